"""The fuzzer: random cases against a resident engine and plain PyTorch, until the time limit.

make fuzz ARGS="--minutes 20 --seed 1"            random cases for 20 minutes
make fuzz ARGS="--case ranks2:12345"              repeat one case, named in a failure
make fuzz ARGS="--without keeps,odd"              leave out habits from habits.py
make fuzz ARGS="--mutations"                      break the engine in each known way until a case fails
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.fuzz.cases import KINDS, Case, draw, parse
from tests.fuzz.habits import HABITS
from tests.fuzz.shrink import shrink
from tests.fuzz.workers import Crew, signature


@dataclass
class Tally:
    """Counts of finished cases, by name or failure signature."""

    cases: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    signatures: Counter[str] = field(default_factory=Counter)
    begin: float = field(default_factory=time.monotonic)

    def table(self) -> str:
        minutes = max(1e-9, (time.monotonic() - self.begin) / 60)
        lines = [f"{'kind':<12}{'cases':>8}{'refused':>9}{'failed':>8}{'a minute':>10}"]
        for kind in [*(kind for kind in KINDS if self.cases[kind]), "all"]:
            numbers = [counter.total() if kind == "all" else counter[kind] for counter in self._counters()]
            lines.append(f"{kind:<12}{numbers[0]:>8}{numbers[1]:>9}{numbers[2]:>8}{numbers[0] / minutes:>10.1f}")
        done = ", ".join(f"{count} {name}" for name, count in sorted(self.notes.items(), key=lambda item: -item[1]))
        return "\n".join([*lines, f"done: {done}"])

    def _counters(self) -> tuple[Counter[str], ...]:
        return self.cases, self.refused, self.failed

    def line(self) -> str:
        kinds = " ".join(f"{kind} {self.cases[kind]}" for kind in KINDS if self.cases[kind])
        numbers = [counter.total() for counter in self._counters()]
        seconds = time.monotonic() - self.begin
        return f"{seconds:5.0f} s  {numbers[0]} cases ({kinds}), {numbers[1]} refused, {numbers[2]} failed"


class Fuzzer:
    """Runs cases in one crew per job, and reports each failure once."""

    def __init__(self, jobs: int, *, mutation: str | None = None, shrinks: bool = True, stops: bool = False) -> None:
        self.tally, self._mutation, self._shrinks, self._stops = Tally(), mutation, shrinks, stops
        self._jobs, self._lock, self._over = jobs, threading.Lock(), threading.Event()
        self._errors: list[BaseException] = []

    def run(self, cases: Iterator[Case], deadline: float) -> Tally:
        threads = [threading.Thread(target=self._work, args=(cases, deadline), daemon=True) for _ in range(self._jobs)]
        for thread in threads:
            thread.start()
        shown = time.monotonic()
        try:
            while any(thread.is_alive() for thread in threads):
                time.sleep(0.2)
                if time.monotonic() - shown > (1 if sys.stderr.isatty() else 10):
                    shown = time.monotonic()
                    self._show()
        except KeyboardInterrupt:
            self._over.set()
            for thread in threads:
                thread.join()
        if sys.stderr.isatty():
            print(file=sys.stderr)
        if self._errors:
            raise self._errors[0]
        return self.tally

    def _show(self) -> None:
        end = "\r" if sys.stderr.isatty() else "\n"
        print(self.tally.line(), end=end, file=sys.stderr, flush=True)

    def _work(self, cases: Iterator[Case], deadline: float) -> None:
        crew = Crew()
        try:
            while not self._over.is_set() and time.monotonic() < deadline:
                with self._lock:
                    case = next(cases, None)
                if case is None:
                    return
                self._judge(case, crew.run(case.name, case.world, self._mutation), crew)
        except BaseException as error:
            self._errors.append(error)
        finally:
            crew.close()

    def _judge(self, case: Case, outcome: Any, crew: Crew) -> None:
        if self._mutation and outcome.wrong and any(crew.run(case.name, case.world).wrong for _ in range(2)):
            outcome.wrong = ""  # the case also fails without the mutation
        with self._lock:
            self.tally.cases[case.kind] += 1
            self.tally.refused[case.kind] += bool(outcome.refused)
            self.tally.notes.update(outcome.notes)
            if not outcome.wrong:
                return
            self.tally.failed[case.kind] += 1
            name = signature(outcome.wrong)
            self.tally.signatures[name] += 1
            is_new = self.tally.signatures[name] == 1
            if self._stops:
                self._over.set()
        if not is_new:
            print(f"\nFAILED again: {case.name}  ({name})", flush=True)
            return
        print(f"\nFAILED: {case.name}\n{outcome.wrong}\nrepeat: {repeat(case)}", flush=True)
        if self._shrinks and not self._stops:
            smaller = shrink(case, lambda one: signature(crew.run(one.name, one.world, self._mutation).wrong) == name)
            if smaller is not case:
                print(f"smaller: {repeat(smaller)}\n{tell(smaller)}", flush=True)


def repeat(case: Case) -> str:
    return f'make fuzz ARGS="--case {case.name}"'


def tell(case: Case) -> str:
    """Return the content of a case as text."""
    lines = [f"  model    {case.model}", f"  settings {case.settings}"]
    lines += [f"  layout {number} {layout}" for number, layout in enumerate(case.layouts)]
    lines += [f"  op {number}     {op}" for number, op in enumerate(case.ops) if op]
    if case.words:
        lines = [f"  words    {' '.join(filter(None, case.words))}"]
    return "\n".join(lines)


def drawn(seed: int, kinds: Sequence[str], count: int | None = None, without: Collection[str] = ()) -> Iterator[Case]:
    """Yield random cases determined by the seed. `without`: names of habits to leave out."""
    dice = random.Random(seed)
    number = 0
    while count is None or number < count:
        (kind,) = dice.choices(kinds, [KINDS[kind] for kind in kinds])
        yield draw(kind, dice.randrange(10**9)).leave_out(without)
        number += 1


def find_mutations(arguments: argparse.Namespace, kinds: Sequence[str]) -> int:
    """Run random cases against each mutation until a case fails. Print the time for each."""
    from tests.mutations import list_mutations

    missed, lines = 0, []
    for name in (name for name, each in list_mutations().items() if each.fuzzed):
        fuzzer = Fuzzer(arguments.jobs, mutation=name, stops=True)
        begin = time.monotonic()
        tally = fuzzer.run(drawn(arguments.seed, kinds, without=arguments.without), begin + 60 * arguments.minutes)
        seconds = time.monotonic() - begin
        found = next(iter(tally.signatures), "")
        missed += not found
        lines.append(
            f"{name:<36}{f'{seconds:.0f} s' if found else 'NOT FOUND':>10}{tally.cases.total():>7} cases  {found[:90]}"
        )
        print(lines[-1], flush=True)
    print("\n".join(["", f"{'mutation':<36}{'found in':>10}", *lines]))
    return bool(missed)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="make fuzz", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="how long; of --mutations, for each (default: 10)")
    parser.add_argument("--seed", type=int, default=None, help="of the cases that are drawn (default: a new one)")
    parser.add_argument("--cases", type=int, default=None, help="stop after so many")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"of {','.join(KINDS)}")
    parser.add_argument("--without", default="", help=f"habits that are left out, of {','.join(HABITS)}")
    parser.add_argument("--jobs", type=int, default=1, help="how many cases at a time (default: 1)")
    parser.add_argument("--case", default=None, help="run this one alone, as a failure names it")
    parser.add_argument("--repeat", type=int, default=1, help="of --case: how often (default: 1)")
    parser.add_argument("--mutate", default=None, help="break the engine in this way")
    parser.add_argument("--mutations", action="store_true", help="look for every mutation until it is found")
    parser.add_argument("--no-shrink", action="store_true", help="do not look for smaller cases")
    arguments = parser.parse_args(words)
    kinds = arguments.kinds.split(",")
    arguments.without = [name for name in arguments.without.split(",") if name]
    for flag, names, known in (("kinds", kinds, KINDS), ("without", arguments.without, HABITS)):
        for name in names:
            if name not in known:
                parser.error(f"--{flag}: {name!r} is none of {', '.join(known)}")
    if arguments.seed is None:
        arguments.seed = random.SystemRandom().randrange(10**6)
    if arguments.case is not None:
        cases: Iterator[Case] = iter([parse(arguments.case)] * arguments.repeat)
        print(tell(parse(arguments.case)))
    elif arguments.mutations:
        return find_mutations(arguments, kinds)
    else:
        print(f'seed {arguments.seed}: make fuzz ARGS="--minutes {arguments.minutes:g} --seed {arguments.seed}"')
        cases = drawn(arguments.seed, kinds, arguments.cases, arguments.without)
    fuzzer = Fuzzer(
        arguments.jobs, mutation=arguments.mutate, shrinks=not arguments.no_shrink and arguments.case is None
    )
    tally = fuzzer.run(cases, time.monotonic() + 60 * arguments.minutes)
    print(tally.table())
    for name, count in tally.signatures.most_common():
        print(f"{count:>6} times {name}")
    return bool(tally.failed.total())


if __name__ == "__main__":
    sys.exit(main())
