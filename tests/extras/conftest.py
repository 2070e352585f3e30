from __future__ import annotations

import torch
from inference.small_nets import fitted_run, reject_run, run, served_run

__all__ = ["fitted_run", "reject_run", "run", "served_run"]

torch.set_num_threads(1)
