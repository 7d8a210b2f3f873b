"""What the names, calls and states in a pickle of torch.save mean.

Nothing is ever imported or called by name: a name becomes a `Global`, if it is allowed, and a call of it one of `constructors`.
"""

from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.torch_file.allowed import NAMES, STORAGES, is_opaque
from mindspeed_ms.core.dist_checkpointing.torch_file.constructors import CALLS, STATES, Refused
from mindspeed_ms.core.dist_checkpointing.torch_file.objects import Global, Opaque, Storage, shown
from mindspeed_ms.core.dist_checkpointing.torch_file.pickle_machine import PickleMachine

_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg", "UserDict": "collections"}


class TorchObjects:
    """Constructors for one file.

    Args:
        path (str): for messages and tensors.

    Attributes:
        machine (PickleMachine): that reads the file; what it has read bounds what constructors may copy.
        storages (dict[str, Storage]): by key.
    """

    def __init__(self, path):
        self.path, self.machine, self.storages, self._spent = path, None, {}, 0

    def find(self, module, name):
        """The `Global` of an allowed name."""
        found = Global(_MODULES.get(module, module), name)
        if is_allowed(found):
            return found
        if found.module.startswith(("torch.nn.modules.", "__torch__")):
            kind = "it holds a whole module, not the state dict of one"
        else:
            kind = "it is not one of the classes that checkpoints consist of"
        raise CheckpointError(f"{self.path} is refused: its pickle names {found}, and {kind}. Nothing of it was run.")

    def call(self, callee, arguments, made_by="call"):
        """Result of a constructor."""
        if type(callee) is not Global or type(arguments) is not tuple:
            raise CheckpointError(
                f"{self.path} is refused: its pickle calls {shown(type(callee).__name__)}, which is no class."
            )
        self.spend(1 + sum(len(value) for value in arguments if hasattr(value, "__len__")))
        pair = (callee.module, callee.name)
        try:
            if pair in CALLS:
                return CALLS[pair](self, *arguments)
            if is_opaque(callee):
                return Opaque(*pair, arguments, made_by=made_by)
            raise Refused("it cannot be called")
        except (Refused, TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
            raise CheckpointError(f"{self.path} is refused: its pickle calls {callee} wrongly: {shown(error)}.") from error

    def new(self, cls, arguments):
        """Result of `cls.__new__`."""
        return self.call(cls, arguments, "new")

    def build(self, target, state):
        """Give an object its state."""
        self.spend(len(state) if hasattr(state, "__len__") else 1)
        try:
            for kind, action in STATES:
                if isinstance(target, kind):
                    return action(self, target, state)
            raise Refused("it has no state")
        except (Refused, TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
            name = target if isinstance(target, Global) else type(target).__name__
            raise CheckpointError(
                f"{self.path} is refused: its pickle sets a wrong state of {name}: {shown(error)}."
            ) from error

    def persistent(self, identity):
        """Storage of a tensor."""
        if type(identity) is not tuple or len(identity) not in (5, 6) or identity[0] != "storage":
            raise CheckpointError(f"{self.path} is refused: its pickle refers to something that is no storage.")
        _, kind, key, location, numel = identity[:5]
        if type(kind) is not Global or kind.name not in STORAGES or type(key) is not str or type(location) is not str:
            raise CheckpointError(f"{self.path} is refused: its pickle has a storage of unknown kind {shown(kind)}.")
        if type(numel) is not int or not 0 <= numel < 1 << 63:
            raise CheckpointError(f"{self.path} is refused: storage {shown(key)} has {shown(numel)} elements.")
        if len(identity) == 6 and identity[5] is not None:
            raise CheckpointError(f"{self.path} is refused: storage {shown(key)} is a view of another one.")
        new = Storage(key, STORAGES[kind.name], numel, location)
        known = self.storages.setdefault(key, new)
        if (known.dtype, known.numel) != (new.dtype, new.numel):
            raise CheckpointError(f"{self.path} is refused: its storage {shown(key)} has two dtypes or sizes.")
        return known

    def spend(self, count):
        """Count what constructors copy; a file that copies much more than it holds is refused."""
        self._spent += count
        self.check_expanded(self._spent)

    def check_expanded(self, count):
        """Refuse a file whose tree has `count` parts, shared ones counted each time, if that is far more than its size."""
        if count > 16 * self.machine.consumed + (1 << 20):
            raise CheckpointError(f"{self.path} is refused: its pickle expands to much more than its own size.")


def read_pickle(path, data, position=0):
    """Read one pickle at `position` of `data` (bytes or mmap): (object, TorchObjects, position after it)."""
    objects = TorchObjects(path)
    objects.machine = PickleMachine(path, data, objects, position)
    return objects.machine.run(), objects, objects.machine.position


def is_allowed(name):
    """Whether a file may have the `Global` `name`."""
    pair = (name.module, name.name)
    return pair in CALLS or pair in NAMES or is_opaque(name)
