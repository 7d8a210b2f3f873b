"""Rewards of generated answers by a Python function of the user."""

import importlib.util
import inspect
import os
import sys
from collections.abc import Mapping, Set
from numbers import Real

import numpy as np

_LARGEST = float(np.finfo(np.float32).max)
ARGUMENTS = ("prompts", "answers", "prompt_ids", "answer_ids", "records")


class RewardError(ValueError):
    """Error: there is no such reward function, it failed, or gave something else than one finite number per answer."""


def load_reward_function(name, spelled):
    """The function FILE.py:NAME.

    Args:
        name (Optional[str]): as above.
        spelled (str): the option, for messages.

    Raises:
        RewardError: it is not given, the file cannot be imported, there is no such function, or it cannot be called.
    """
    if not name:
        raise RewardError(
            f"{spelled} is not given: name the function that gives the rewards, as FILE.py:NAME, or a reward model "
            "(--reward-model)."
        )
    path, _, function = name.rpartition(":")
    if not path or not function.isidentifier():
        raise RewardError(f"{spelled} is {name}: expected FILE.py:NAME, as rewards.py:reward.")
    if not os.path.isfile(path):
        raise RewardError(f"{spelled} is {name}: there is no file {path}.")
    described = importlib.util.spec_from_file_location("reward_function", path)
    if described is None:
        raise RewardError(f"{spelled} is {name}: {path} is no Python file (.py).")
    module = importlib.util.module_from_spec(described)
    sys.modules[described.name] = module  # dataclasses look their module up
    folder = os.path.dirname(os.path.abspath(path))
    if folder not in sys.path:
        sys.path.append(folder)  # what lies beside the file can be imported
    try:
        described.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise RewardError(f"{spelled} is {name}: {path} cannot be imported: {_text(error)}.") from error
    found = getattr(module, function, None)
    if not callable(found):
        known = [one for one, value in vars(module).items() if inspect.isfunction(value) and not one.startswith("_")]
        raise RewardError(f"{spelled} is {name}: {path} has no function {function}; it has {', '.join(known) or 'none'}.")
    return RewardFunction(found, name)


class RewardFunction:
    """A reward function: `function(**arguments) -> one number for each answer`.

    Args:
        function (Callable): takes those of ARGUMENTS that it names, by keyword, each a list with an entry per answer: texts of
            prompts and answers (None without a tokenizer), their ids, and the records of the prompts. `**others` gets all.
        name (str): of it, for messages.

    Raises:
        RewardError: a required parameter of the function has another name.
    """

    def __init__(self, function, name):
        self.function, self.name = function, name
        try:
            parameters = inspect.signature(function).parameters.values()
        except (ValueError, TypeError):
            raise RewardError(f"{name} does not say its parameters: expected a Python function.") from None
        takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters)
        named = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
        unknown = [one.name for one in named if one.name not in ARGUMENTS and one.default is one.empty]
        unknown += [f"{one.name}, by position only" for one in parameters if one.kind is one.POSITIONAL_ONLY]
        if unknown:
            raise RewardError(f"{name} has the parameter {unknown[0]}: expected some of {', '.join(ARGUMENTS)}.")
        self.names = ARGUMENTS if takes_all else tuple(one.name for one in named if one.name in ARGUMENTS)

    def __call__(self, places, **arguments):
        """Rewards (list[float]) of answers.

        Args:
            places (list[str]): name of the record of each answer, for messages.
            arguments: lists, see ARGUMENTS.

        Raises:
            RewardError: names function and record.
        """
        given = {name: arguments[name] for name in self.names}
        try:
            found = self.function(**given)
            rewards = None if _is_no_list(found) else list(found)
        except (Exception, SystemExit) as error:
            raise RewardError(f"{self._where(places, given)}: {_text(error)}.") from error
        if rewards is None:
            raise RewardError(f"{self.name} gave {_shown(found)}: expected a list with a number for each answer.")
        if len(rewards) != len(places):
            raise RewardError(f"{self.name} gave {len(rewards)} rewards of {len(places)} answers: expected one for each.")
        return [self._checked(reward, place) for reward, place in zip(rewards, places)]

    def _checked(self, reward, place):
        value = reward.item() if getattr(reward, "size", None) == 1 and hasattr(reward, "item") else reward
        if not isinstance(value, Real) or not abs(value) <= _LARGEST:  # NaN is not
            raise RewardError(f"{self.name} gave {_shown(value)} for an answer to {place}: expected a finite float32 number.")
        return float(value)

    def _where(self, places, given):
        """What fails: the first answer that does so alone."""
        for number, place in enumerate(places):
            try:
                list(self.function(**{name: values[number : number + 1] for name, values in given.items()}))
            except (Exception, SystemExit):
                return f"{self.name} failed at an answer to {place}"
        return f"{self.name} failed at {len(places)} answers together, the first to {places[0]}"


def _is_no_list(found):
    """Whether what a function gave is no sequence of rewards in the order of the answers."""
    return isinstance(found, str | bytes | Mapping | Set) or not (hasattr(found, "__iter__") or hasattr(found, "__getitem__"))


def _shown(value):
    """A value in one short line."""
    return " ".join(f"{value!r}".split())[:80]


def _text(error):
    """An exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")
