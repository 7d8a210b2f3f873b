"""Where a training stands."""

from dataclasses import dataclass, fields


@dataclass
class TrainState:
    """Counters that are saved with a checkpoint.

    Attributes:
        iteration (int): steps that are done.
        consumed_train_samples (int): training samples used, over all data-parallel ranks.
        consumed_valid_samples (int): the same for evaluations.
        skipped_iterations (int): steps whose gradients were not finite, so that nothing was updated.
        epoch (int): epoch of the last step, from 0.
        step_in_epoch (int): steps done in that epoch.
    """

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    skipped_iterations: int = 0
    epoch: int = 0
    step_in_epoch: int = 0

    @classmethod
    def from_dict(cls, values):
        """From the dict of a checkpoint; unknown counters of other versions are left out."""
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})
