"""Worker: one rank of a forked world; receives functions, runs them, sends back results or errors."""

import faulthandler
import importlib
import importlib.util
import os
import pickle
import signal
import sys
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection


@dataclass
class Task:
    """Call for every rank of a world: the place of the function, and its pickled arguments."""

    module: str
    file: str
    function: str
    arguments: bytes
    unique_id: str
    search_path: list = field(default_factory=list)
    directory: str = "."


@dataclass
class Outcome:
    """Outcome of a rank's call: a value, an exception with its traceback text, or the status of a dead process."""

    rank: int
    value: object = None
    exception: BaseException = None
    traceback: str = ""
    exit_status: int = None

    @property
    def succeeded(self):
        """Whether the function returned."""
        return self.exception is None


def serve(descriptor, rank, size):
    """Run tasks from the socket `descriptor` until it is closed; returns the exit status."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
    connection = Connection(descriptor)
    while True:
        try:
            task = connection.recv()
        except (EOFError, OSError):
            return 0
        connection.send_bytes(_encoded(run(task, rank, size)))


def run(task, rank, size):
    """Run one task as rank `rank` of `size`, starting and ending communication; returns its `Outcome`."""
    try:
        function, arguments, keywords = _prepare(task)
        start_rank(rank, size, task.unique_id)
        value = function(*arguments, **keywords)
        outcome = Outcome(rank, to_host(value))
    except BaseException as exception:  # SystemExit and KeyboardInterrupt of a test are its outcome, not the worker's end
        outcome = Outcome(rank, exception=exception, traceback=traceback.format_exc())
    try:
        end_rank(outcome.exception)
    except Exception as exception:  # a call that was started and cannot be completed
        if outcome.succeeded:
            outcome = Outcome(rank, exception=exception, traceback=traceback.format_exc())
    return outcome


def start_rank(rank, size, unique_id):
    """Set the rank of this process, and start the device and communication."""
    from mindspeed_ms.core import autograd, comm, device
    from mindspeed_ms.core.launch_environment import LaunchEnvironment, set_launch_environment

    set_launch_environment(LaunchEnvironment(rank, size, rank, size, unique_id, "world"))
    device.initialize_device()
    autograd.enable_tape()  # a failed kernel of the task before has switched it off
    comm.init()


def end_rank(exception=None):
    """End the parallel state and the groups; peers that still wait for this rank get an error with the reason."""
    parallel_state = sys.modules.get("mindspeed_ms.core.parallel_state")
    if parallel_state is not None:
        parallel_state.destroy_model_parallel()
    from mindspeed_ms.core import comm

    comm.destroy(exception)


def _prepare(task):
    os.chdir(task.directory)
    for entry in reversed([entry for entry in task.search_path if entry not in sys.path]):
        sys.path.insert(0, entry)
    target = _module(task.module, task.file)
    for name in task.function.split("."):
        target = getattr(target, name)
    arguments, keywords = pickle.loads(task.arguments)
    return target, arguments, keywords


def _module(name, file):
    """Module by name and file. Test files are found by file, since pytest names them in several ways."""
    if name == "__main__":  # the calling script: its guarded part must not run here
        module = _module_of_file("__mp_main__", file)
        sys.modules["__main__"] = module  # where its classes are looked for when arguments are unpickled
        return module
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not file or error.name is None or not (name + ".").startswith(error.name + "."):
            raise
        module = None
    if module is not None and (not file or getattr(module, "__file__", None) == file):
        return module
    return _module_of_file(name, file)


def _module_of_file(name, file):
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__file__", None) == file:
        return loaded
    specification = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    try:
        specification.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def to_host(value):
    """Replace tensors in `value` (nested tuples, lists, dicts) by numpy arrays; bfloat16 becomes float32."""
    from mindspore import Tensor

    if isinstance(value, Tensor):
        if str(value.dtype) == "BFloat16":
            value = value.float()
        return value.asnumpy().copy()
    if isinstance(value, dict):
        return {key: to_host(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(to_host(item) for item in value)
    return value


def _encoded(outcome):
    """Pickle an outcome; values that cannot be pickled are replaced by their description."""
    try:
        data = pickle.dumps(outcome)
        pickle.loads(data)  # exceptions often pickle but do not come back
        return data
    except Exception as error:
        if outcome.exception is None:
            text = f"the result of rank {outcome.rank} ({type(outcome.value).__name__}) cannot be sent: {error}"
            return pickle.dumps(Outcome(outcome.rank, exception=TypeError(text)))
        stand_in = RuntimeError(f"{type(outcome.exception).__name__}: {outcome.exception}")
        return pickle.dumps(Outcome(outcome.rank, exception=stand_in, traceback=outcome.traceback))
