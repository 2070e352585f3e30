"""The LightningModule, optimizers, schedules and callbacks."""
