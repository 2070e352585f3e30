"""`cifar-lit devices --check`: the devices of a machine, and processes together, tried out in processes that can be ended."""
