from __future__ import annotations

import re
from pathlib import Path

from command_line import started


def test_a_run_prints_no_warning_tip_or_advert_even_where_each_warning_is_an_error() -> None:
    answer = started("-W", "error", "-m", "cifar_lit", "train", "--recipe", "small.yaml")
    assert (answer.code, answer.err) == (0, "")
    assert not re.search(r"warn|tip|💡|litlogger|GPU available|https?://", answer.out, re.IGNORECASE), answer.out
    assert Path("lightning_logs/small-1/metrics.json").is_file()
