"""Choice of a kernel's configuration: known, measured, or predicted by the model."""

from __future__ import annotations

import math
import os
import threading
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, fields, is_dataclass
from datetime import datetime, timezone
from typing import Any, Generic, TypeAlias, TypeVar

import torch

from tritonkittens._progress import DRAWN, Progress
from tritonkittens.launch import Device as Facts
from tritonkittens.launch import device_facts

from . import shipped
from .cost import Cost, Device
from .race import Race, measurements_of, race
from .report import Report, Row, plain
from .store import DeviceKey, Entry, Trial, problem_key, store_for

P = TypeVar("P", bound=Hashable)
C = TypeVar("C", bound=Hashable)
CompileAll: TypeAlias = Callable[[Sequence[C]], Iterable[Future[Any]]]

# factor on the predicted time of a near problem's winner at distance 0; 1 at a distance of ln 2 for each numeric field
NEAREST_FACTOR = 0.95

# One lock for all families, because concurrent measurements on one GPU disturb each other. Re-entrant, because a
# measured kernel may request a configuration itself.
_deciding = threading.RLock()


def tuning() -> bool:
    """Whether TK_TUNE enables measurements ("1"; "0", empty or unset: no).

    Raises:
        ValueError: for another value.
    """
    value = os.environ.get("TK_TUNE", "")
    if value not in ("", "0", "1"):
        raise ValueError(f"TK_TUNE={value!r}: 1 measures problems that are not known yet, 0 does not")
    return value == "1"


def tries() -> int:
    """Return the number of candidates to measure: TK_TUNE_TRIES, or 12.

    Raises:
        ValueError: it is no positive number.
    """
    value = os.environ.get("TK_TUNE_TRIES") or "12"
    if not value.isdecimal() or int(value) < 1:
        raise ValueError(f"TK_TUNE_TRIES={value!r}: the number of candidates to measure is a positive integer")
    return int(value)


def as_values(record: Any) -> dict[str, Any]:
    """Return a dataclass or NamedTuple as a dictionary of JSON values; tuples become lists.

    Raises:
        TypeError: for another type, or a field's value that is not plain.
    """
    if is_dataclass(record) and not isinstance(record, type):
        values = {f.name: getattr(record, f.name) for f in fields(record)}
    elif hasattr(record, "_asdict"):
        values = record._asdict()
    else:
        raise TypeError(f"{record!r}: a problem or configuration is a frozen dataclass or a NamedTuple")
    return {name: _plain_value(record, name, value) for name, value in values.items()}


def _plain_value(record: Any, name: str, value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_plain_value(record, name, v) for v in value]
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError(
        f"{type(record).__name__}.{name}={value!r}: fields are None, bool, int, float, str, or tuples of these"
    )


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def distance(problem: Mapping[str, Any], other: Mapping[str, Any], match: Sequence[str] = ()) -> float | None:
    """Return the distance of the problems `problem` and `other`: |ln(a / b)|, averaged over their numeric fields
    other than those in `match`.

    None where they are not comparable: a field of `match`, or one that is no number, differs.
    """
    if problem.keys() != other.keys():
        return None
    logarithms = []
    for name, a in problem.items():
        b = other[name]
        if name not in match and all(type(v) in (int, float) for v in (a, b)) and (a == b or min(a, b) > 0):
            logarithms.append(abs(math.log(a / b)) if a != b else 0.0)
        elif a != b:
            return None
    return sum(logarithms) / len(logarithms) if logarithms else 0.0


@dataclass(frozen=True)
class _Neighbour(Generic[C]):
    """A near, measured problem: its winner, the factor on the winner's predicted time, and whether the winner
    overrides the model.
    """

    entry: Entry
    config: C
    factor: float
    alike: bool = False


@dataclass(frozen=True)
class _Choice(Generic[C]):
    config: C
    source: str
    entry: Entry | None  # None: not measured
    where: str = ""  # the table or store of the entry


def _device_of(identity: int | Facts | Device) -> Device:
    """The rates of a device, by its index or facts."""
    if isinstance(identity, Device):
        return identity
    return Device.from_facts(identity if isinstance(identity, Facts) else device_facts(identity))


class Family(Generic[P, C]):
    """A family of kernels of one purpose. Each of its problems has a best configuration.

    Args:
        name: its name on the command line.
        config_type: a frozen dataclass (or NamedTuple) of plain values: None, bool, int, float, str, tuples of these.
        candidates: returns the configurations that can solve a problem on a device.
        cost: returns the model's prediction for a problem, a configuration and a device.
        problem_type: like `config_type`; small and hashable, because a choice looks it up.
        match: the problem's fields that must be equal for a winner to apply to another problem (dtype, layouts).
            Fields that are no numbers must always be equal.
        alike: returns problems whose winner also applies to an unmeasured problem, the most similar first.
        fits: whether a stored configuration can solve a problem (None: the candidates can).

    Raises:
        ValueError: `match` names a field that `problem_type` lacks.
    """

    def __init__(
        self,
        name: str,
        config_type: type[C],
        candidates: Callable[[P, Device], Sequence[C]],
        cost: Callable[[P, C, Device], Cost],
        *,
        problem_type: type[P],
        match: Sequence[str] = (),
        alike: Callable[[P], Iterable[P]] | None = None,
        fits: Callable[[P, C], bool] | None = None,
    ):
        self.name, self.config_type, self.problem_type, self.match = name, config_type, problem_type, tuple(match)
        self.problem_fields = field_names(problem_type)
        for field in self.match:
            if field not in self.problem_fields:
                raise ValueError(
                    f"Family({name!r}, match=…{field!r}…): {problem_type.__name__} has the fields "
                    f"{', '.join(self.problem_fields)}"
                )
        self._candidates, self._cost, self._alike, self._fits = candidates, cost, alike, fits
        self._settled: dict[tuple[Any, P], C] = {}
        self._guessed: dict[tuple[Any, P], C] = {}  # to be measured at the first call with `measure`
        self._choices: dict[tuple[Any, P], _Choice[C]] = {}

    def choose(
        self,
        problem: P,
        measure: Callable[[C], float] | None = None,
        device: int | torch.device | Device | None = None,
        compile_all: CompileAll[C] | None = None,
    ) -> C:
        """Return the configuration for a problem.

        The first source that knows the problem decides: this process; the results on disk (`tune.folder()`) of such a
        device and these versions; the shipped table; a measurement; a problem that is `alike`; the model.
        A measurement runs with TK_TUNE=1 and `measure`, outside of CUDA graph captures and simulated devices. It
        races the TK_TUNE_TRIES (12) candidates that the model ranks best, and keeps the result on disk. The model's
        choice stays unless another is faster beyond the noise. The model takes the winner of a near problem to be up
        to 5 % faster than predicted (`distance`).
        The first call with a `measure` reads TK_TUNE; `forget` resets that.

        Args:
            problem: a value of `problem_type`.
            measure: returns the seconds of one launch with a configuration. It compiles and warms up by itself, may
                raise, and is called about twice for each candidate.
            compile_all: begins to compile candidates, and returns their futures. They are awaited before the first
                measurement.
            device: a CUDA index (the fastest look-up), None for the current device (within
                `tritonkittens.sim.device`, the simulated one), or a `Device`, which need not exist here.

        Raises:
            ValueError: no candidate can solve the problem, or TK_TUNE or TK_TUNE_TRIES is malformed.
            RuntimeError: no device.
        """
        key = (device if device.__class__ is int and device >= 0 else self._identity(device), problem)
        config = self._settled.get(key)
        if config is not None:
            return config
        config = self._guessed.get(key) if measure is None else None
        return self._choice(key, measure, compile_all).config if config is None else config

    def tune(
        self,
        problem: P,
        measure: Callable[[C], float],
        device: int | torch.device | Device | None = None,
        tries: int | None = None,
        compile_all: CompileAll[C] | None = None,
    ) -> C:
        """Measure a problem and keep the result on disk, even if it was measured before, and without TK_TUNE=1.

        Ctrl-C keeps what was measured, and then raises KeyboardInterrupt. `tries` is the number of candidates (None:
        TK_TUNE_TRIES, 12). Other arguments as in `choose`.

        Raises:
            RuntimeError: during the capture of a CUDA graph, or on a simulated device.
        """
        key = (self._identity(device), problem)
        if not _may_measure(key[0]):
            raise RuntimeError(
                f"{self.name}.tune({problem}): nothing is measured during the capture of a CUDA graph or on a "
                "simulated device"
            )
        with _deciding:
            options = self._options(key)
            return self._remember(
                key, self._measured(key, options, self._neighbour(key, options), measure, tries, compile_all)
            ).config

    def may_measure(self, device: int | torch.device | Device | None = None) -> bool:
        """Whether `tune` can measure now: not on a simulated device, nor during the capture of a CUDA graph."""
        return _may_measure(self._identity(device))

    def is_measured(self, problem: P, device: int | torch.device | Device | None = None) -> bool:
        """Whether the choice for a problem was measured: by this process, by an earlier one (on disk), or for a table
        that ships with the package."""
        key = (self._identity(device), problem)
        with _deciding:
            known = self._choices.get(key) or self._looked_up(key, self._options(key), problem)
        return known is not None and known.entry is not None

    def explain(self, problem: P, device: int | torch.device | Device | None = None) -> Report:
        """Return a `Report`: the source of the choice for a problem, the tried configurations, and the reason for the
        winner. Measures nothing.
        """
        key = (self._identity(device), problem)
        with _deciding:
            in_memory = key in self._choices
            choice = self._choice(key, None)
            options = self._options(key)
            neighbour = None if choice.entry else self._neighbour(key, options)
            trials = {problem_key(t.config): t for t in (choice.entry.tried if choice.entry else ())}
            rows = []
            for config, cost, predicted in self._ranked(key, options, neighbour):
                trial = trials.get(problem_key(as_values(config)))
                rows.append(
                    Row(
                        as_values(config),
                        cost,
                        predicted,
                        trial.seconds if trial else None,
                        trial.error if trial else None,
                    )
                )
        chosen = as_values(choice.config)
        rows.sort(
            key=lambda row: (row.config != chosen, row.seconds is None, row.error is None, row.seconds or row.predicted)
        )
        name = key[0].name if isinstance(key[0], (Device, Facts)) else device_facts(key[0]).name
        reason = _reason(choice, rows, neighbour)
        return Report(self.name, as_values(problem), name, choice.source, in_memory, chosen, reason, tuple(rows))

    def forget(self) -> None:
        """Forget the choices of this process. Disk and tables stay."""
        with _deciding:
            self._settled.clear()
            self._guessed.clear()
            self._choices.clear()

    # ---- the device

    def _identity(self, device: int | torch.device | Device | None) -> int | Facts | Device:
        """Return the key of choices: the index of a GPU, the facts of a simulated device, or a device that need not
        exist here.
        """
        if isinstance(device, Device):
            return device
        try:
            facts = device_facts(device)
        except (RuntimeError, AssertionError) as error:  # torch asserts where it was built without CUDA
            raise RuntimeError(
                f"{self.name}: there is no CUDA device ({error}); on a machine without one pass "
                "device=Device.named('H200')"
            ) from error
        return facts.index if facts.index >= 0 else facts

    # ---- deciding; all of it under the lock

    def _choice(
        self, key: tuple[Any, P], measure: Callable[[C], float] | None, compile_all: CompileAll[C] | None = None
    ) -> _Choice[C]:
        wanted = measure is not None and tuning()
        possible = wanted and _may_measure(key[0])
        settled = measure is not None and possible == wanted  # else a later call may measure
        with _deciding:
            known = self._choices.get(key)
            # another thread was first, or nothing is left to measure
            if known is not None and (key in self._settled or not possible):
                return self._remember(key, known, settled or key in self._settled)
            options = self._options(key)
            choice = self._looked_up(key, options, key[1])
            if choice is None:
                neighbour = self._neighbour(key, options)
                if not possible or measure is None:
                    return self._remember(key, self._predicted(key, options, neighbour), settled)
                choice = self._measured(key, options, neighbour, measure, None, compile_all)
            return self._remember(key, choice)

    def _remember(self, key: tuple[Any, P], choice: _Choice[C], settled: bool = True) -> _Choice[C]:
        self._choices[key] = choice
        (self._settled if settled else self._guessed)[key] = choice.config
        return choice

    def _options(self, key: tuple[Any, P]) -> dict[C, None]:
        options = dict.fromkeys(self._candidates(key[1], _device_of(key[0])))
        if not options:
            raise ValueError(f"{self.name}: no configuration can solve {key[1]}")
        return options

    def _config(self, values: dict[str, Any], options: dict[C, None], problem: P) -> C | None:
        """Return a stored configuration if it can still solve the problem; it is then one of the `options`."""
        try:
            config = self.config_type(**{name: _tuples(value) for name, value in values.items()})
        except (TypeError, ValueError):  # fields or rules changed since
            return None
        if config not in options and self._fits is not None and self._fits(problem, config):
            options[config] = None
        return config if config in options else None

    def _looked_up(self, key: tuple[Any, P], options: dict[C, None], problem: P) -> _Choice[C] | None:
        """Return the stored winner of the problem in `key`, if it can solve `problem`."""
        device, values = _device_key(key[0]), as_values(key[1])
        store = store_for(device)
        known = (self.name, problem_key(values))
        tables = [
            ("table", table.entries.get(known), f"{table.path.name} of {table.device.name}")
            for table in shipped.tables_for(device)
        ]
        for source, entry, where in [("disk", store.get(self.name, values), str(store.path)), *tables]:
            config = self._config(entry.config, options, problem) if entry else None
            if config is not None:
                return _Choice(config, source, entry, where)
        return None

    def _neighbour(self, key: tuple[Any, P], options: dict[C, None]) -> _Neighbour[C] | None:
        """Return the measured problem that is alike, or the nearest one, whose winner is a candidate here and whose
        bonus is below 1.
        """
        for problem in self._alike(key[1]) if self._alike else ():
            known = self._looked_up((key[0], problem), options, key[1])
            if known is not None and known.entry is not None:
                return _Neighbour(known.entry, known.config, NEAREST_FACTOR, alike=True)
        device, values = _device_key(key[0]), as_values(key[1])
        nearest, best = math.log(2), None
        for entries in (store_for(device).entries(), *(table.entries for table in shipped.relatives(device))):
            for entry in entries.values():
                apart = distance(values, entry.problem, self.match) if entry.family == self.name else None
                if apart is not None and apart < nearest:
                    config = self._config(entry.config, options, key[1])
                    if config is not None:
                        factor = NEAREST_FACTOR + (1 - NEAREST_FACTOR) * apart / math.log(2)
                        nearest, best = apart, _Neighbour(entry, config, factor)
        return best

    def _ranked(
        self, key: tuple[Any, P], options: Mapping[C, None], neighbour: _Neighbour[C] | None
    ) -> list[tuple[C, Cost, float]]:
        """Return candidates, their costs, and the seconds of their ranking, the best first."""
        device, found = _device_of(key[0]), []
        for config in options:
            cost = self._cost(key[1], config, device)
            found.append(
                (config, cost, cost.total * (neighbour.factor if neighbour and neighbour.config == config else 1.0))
            )
        found.sort(key=lambda item: item[2])
        if found[0][2] == math.inf:
            raise ValueError(f"{self.name}: {device.name} can run none of the {len(found)} configurations for {key[1]}")
        return found

    def _predicted(self, key: tuple[Any, P], options: Mapping[C, None], neighbour: _Neighbour[C] | None) -> _Choice[C]:
        predicted = {config: seconds for config, _, seconds in self._ranked(key, options, neighbour)}
        if neighbour and neighbour.alike and predicted[neighbour.config] < math.inf:
            return _Choice(neighbour.config, "alike", None)
        best = next(iter(predicted))
        return _Choice(best, "nearest" if neighbour and neighbour.config == best else "model", None)

    def _measured(
        self,
        key: tuple[Any, P],
        options: Mapping[C, None],
        neighbour: _Neighbour[C] | None,
        measure: Callable[[C], float],
        count: int | None,
        compile_all: CompileAll[C] | None,
    ) -> _Choice[C]:
        """Race the model's best candidates, of which its choice is the incumbent, and keep the result.

        Raises KeyboardInterrupt after an interrupted race was kept.
        """
        ranked = self._ranked(key, options, neighbour)
        costs = {config: cost for config, cost, predicted in ranked if predicted < math.inf}
        incumbent = self._predicted(key, options, neighbour).config
        # the winner of a near problem is tried anyway
        wanted = [incumbent, *list(costs)[: count or tries()], *((neighbour.config,) if neighbour else ())]
        contenders = [config for config in dict.fromkeys(wanted) if config in costs]
        result = _raced(self.name, contenders, measure, compile_all)
        choice = self._kept(key, {config: costs[config] for config in contenders}, result)
        if result.is_interrupted:
            if choice is not None:
                self._remember(key, choice, settled=False)
            raise KeyboardInterrupt
        if choice is not None:
            return choice
        first = next(iter(result.errors.values()))
        warnings.warn(
            f"{self.name}: none of the {len(contenders)} configurations could be measured for {key[1]}, so the "
            "model's choice stands. "
            f"The first failed with {first}",
            RuntimeWarning,
            stacklevel=2,
        )
        return _Choice(
            next((config for config, *_ in ranked if config not in result.errors), ranked[0][0]), "model", None
        )

    def _kept(self, key: tuple[Any, P], contenders: Mapping[C, Cost], result: Race[C]) -> _Choice[C] | None:
        """Return the winner of a race, kept on disk; None where nothing was measured."""
        seconds = None if result.winner is None else result.seconds(result.winner)
        if result.winner is None or seconds is None:
            return None
        tried = tuple(
            Trial(as_values(c), cost.components(), result.seconds(c), result.errors.get(c))
            for c, cost in contenders.items()
            if result.times[c] or c in result.errors
        )
        date = datetime.now(timezone.utc).isoformat(timespec="seconds")
        entry = Entry(self.name, as_values(key[1]), as_values(result.winner), seconds, tried, date)
        store = store_for(_device_key(key[0]))
        store.add(entry)
        return _Choice(result.winner, "measured", entry, str(store.path))


def _raced(name: str, contenders: list[C], measure: Callable[[C], float], compile_all: CompileAll[C] | None) -> Race[C]:
    """Compile and race configurations, with a bar on a terminal."""
    futures = [] if compile_all is None else list(compile_all(contenders))
    waiting = set(futures)
    try:
        with Progress(f"compile {name}", len(futures)) as bar:
            while waiting:
                bar.show(len(futures) - len(waiting), "configurations")
                _, waiting = wait(waiting, DRAWN if bar.shown else None, FIRST_COMPLETED)
    except KeyboardInterrupt:
        return Race(times={config: [] for config in contenders}, is_interrupted=True)
    finally:
        for future in waiting:
            future.cancel()
    best = math.inf
    with Progress(f"tune {name}", measurements_of(len(contenders))) as bar:

        def counted(config: C) -> float:
            nonlocal best
            seconds = measure(config)
            best = min(best, seconds)
            return seconds

        return race(contenders, counted, lambda count, _: bar.show(count, f"best {best * 1e6:.1f} µs"))


AnyFamily = Family[Any, Any]  # one of whatever problems and configurations


def field_names(record_type: type) -> tuple[str, ...]:
    """Return the field names of a dataclass or NamedTuple.

    Raises:
        TypeError: for another type.
    """
    if is_dataclass(record_type):
        return tuple(f.name for f in fields(record_type))
    if not hasattr(record_type, "_fields"):
        raise TypeError(f"{record_type!r}: a problem or configuration is a frozen dataclass or a NamedTuple")
    return record_type._fields


def _device_key(identity: int | Facts | Device) -> DeviceKey:
    facts = device_facts(identity) if isinstance(identity, int) else identity
    return DeviceKey(facts.name, facts.multiprocessors, facts.capability)


def _may_measure(identity: int | Facts | Device) -> bool:
    """Whether measurements are possible: a capture would record the launches, and a simulated device has no time of
    its own.
    """
    if isinstance(identity, Facts):
        return False
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def _reason(choice: _Choice[Any], rows: Sequence[Row], neighbour: _Neighbour[Any] | None) -> str:
    """Return one sentence; `rows` begin with the winner."""
    entry, best = choice.entry, rows[0]
    if entry is not None:
        others = [row.seconds for row in rows[1:] if row.seconds is not None]
        margin = f", {(others[0] / entry.seconds - 1) * 100:.1f} % before the next" if others else ""
        counted = f" of {len(entry.tried)} measured, among {len(rows)} candidates" if choice.source != "table" else ""
        kept = {"measured": "kept in ", "disk": "read from ", "table": "shipped in "}[choice.source] + choice.where
        return f"Measured fastest ({entry.seconds * 1e6:.2f} µs{margin}){counted}, on {entry.date}; {kept}."
    if choice.source == "alike" and neighbour is not None:
        return f"Won when {plain(neighbour.entry.problem)} was measured, which is computed alike."
    rest = min((row.predicted for row in rows[1:]), default=math.inf)
    margin = f"; the next is at {rest * 1e6:.2f} µs" if rest < math.inf else ""
    text = (
        f"Lowest prediction of {len(rows)} candidates: {best.predicted * 1e6:.2f} µs, bound by "
        f"{best.cost.bound}{margin}."
    )
    if choice.source == "nearest" and neighbour is not None:
        text += f" Times {neighbour.factor:.2f} because it won when {plain(neighbour.entry.problem)} was measured."
    return text
