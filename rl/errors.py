"""What ends a training run for a reason outside the code; each message says what to do. Imports no torch."""

from __future__ import annotations


class TrainingError(Exception):
    """A training run cannot go on."""


class TrainingDiverged(TrainingError):
    """Too many steps in a row had a loss or gradient that is not finite."""


class NoUsableRollouts(TrainingError):
    """Too many batches in a row in which infrastructure failed every rollout."""


class WorkerLost(TrainingError):
    """A worker or trainer process died and was not, or could not be, replaced."""


class WorkerDied(Exception):
    """A rollout worker died during a call; it has been replaced, and the call may be made again."""


class CheckpointError(TrainingError):
    """A checkpoint is missing, incomplete or damaged, or could not be written."""


class CheckpointNotFound(TrainingError):
    """The folder that should hold a model is missing or is not a checkpoint."""


class MissingPackage(TrainingError):
    """Something was asked for that needs a package which is not installed, or not in that version."""


class UnsupportedModel(ValueError):
    """A model that this engine or trainer would not compute right; the message says why and what to use instead."""


class NotEnoughGpus(TrainingError):
    """A stage needs more GPUs than the cluster has."""
