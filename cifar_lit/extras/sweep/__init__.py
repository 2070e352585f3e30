"""`cifar-lit sweep`: search settings with Optuna. Each trial is a training in a process of its own."""
