from __future__ import annotations

import torch
from extras.serving import service
from inference.small_nets import fitted_run, run, served_run

__all__ = ["fitted_run", "run", "served_run", "service"]

torch.set_num_threads(1)
