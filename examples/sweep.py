"""Search settings with Optuna: python examples/sweep.py --trials 50

Edit `MODEL`, `DATA` and `suggest`. A trial is scored on validation images and ends early if it is behind the median of
the others. All trials are in a database: start the script again to continue. To share the trials among machines, or
among the tasks of a SLURM array, start it on each with --storage postgresql://USER@HOST/sweeps (pip install psycopg).
The printed command trains the best settings with new seeds, and tests them: only these are results.
"""

import argparse
from pathlib import Path

import lightning as L
import optuna
import yaml

from cifar_lit import ImageClassifier, ImageData

MODEL = {"net": "shapenet", "optimizer": "adamw", "schedule": "one_cycle"}
DATA = {"dataset": "shapes", "val_size": 0.1, "batch_size": 128, "images": {"count": 20_000, "mean": 0.5, "std": 0.25}}


def suggest(trial: optuna.Trial) -> dict[str, float]:
    """Return the settings of the model in a trial."""
    return {
        "lr": trial.suggest_float("lr", 3e-3, 0.1, log=True),
        "label_smoothing": trial.suggest_float("label_smoothing", 0.0, 0.2),
    }


class Prune(L.Callback):
    """Report the score of each epoch, and end a trial that the pruner gives up."""

    def __init__(self, trial: optuna.Trial) -> None:
        self.trial = trial

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Report the score of an epoch."""
        if not trainer.sanity_checking:
            self.trial.report(float(trainer.callback_metrics["val/accuracy"]), trainer.current_epoch)
            if self.trial.should_prune():
                raise optuna.TrialPruned


def train(trial: optuna.Trial, epochs: int) -> float:
    """Return the validation accuracy of a trial after its last epoch."""
    L.seed_everything(0)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(max_epochs=epochs, callbacks=[Prune(trial)], enable_model_summary=False, **quiet)
    trainer.fit(ImageClassifier(**MODEL, **suggest(trial)), ImageData(**DATA))
    return float(trainer.callback_metrics["val/accuracy"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20, help="trials of this process")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--storage", default="sqlite:///sweep.db", help="database with all trials")
    options = parser.parse_args()
    study = optuna.create_study(
        study_name="sweep", storage=options.storage, load_if_exists=True, direction="maximize",
        pruner=optuna.pruners.MedianPruner(n_warmup_steps=1),
    )  # fmt: skip
    study.optimize(lambda trial: train(trial, options.epochs), n_trials=options.trials)
    best = {"trainer": {"max_epochs": options.epochs}, "model": {**MODEL, **study.best_params}, "data": DATA}
    Path("best.yaml").write_text(yaml.safe_dump(best), encoding="utf-8")
    print(f"best of {len(study.trials)} trials: validation accuracy {study.best_value:.4f}; train it with new seeds:")
    print("cifar-lit train --recipe best.yaml --seeds 1-5")
