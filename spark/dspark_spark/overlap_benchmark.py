"""`dspark bench overlap`: one group of requests against two, over links of different length.

One engine, one worker process, and between them a relay process that adds a delay to every round trip
(`dspark.link_delay`). For each delay and each number of concurrent requests: warm-ups with each arrangement, in which
the choosing one also learns, then repetitions in which one group, two groups and the choice take turns, each answering
the same prompts to the same length at temperature 0. Texts are the same in all arrangements, which is checked, so that
times alone differ. Ratios are taken inside a repetition, in which drift of the machine cancels; medians are over
repetitions. Times are wall-clock from the first submission to the last token, prefill included.

Called by the command line. It changes the arrangement between answers, while no request runs.
"""

from __future__ import annotations

import json
import queue
import socket
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from dspark.link_delay import DelayedLink
from dspark_spark.api import FINISH_ABORT, FINISH_ERROR, Delta, GenerateRequest, SamplingParams
from dspark_spark.build import Spark
from dspark_spark.held_out import PROMPT_SETS

LINK_TIMEOUT_S = 30.0
ARRANGEMENTS: dict[str, int | None] = {"1_group": 1, "2_groups": 2, "auto": None}
COLUMNS = ("added ms", "requests", "1 group", "2 groups", "auto", "2 : 1", "auto : 1", "chosen")
ECHOES = 200
WARM_UPS = 2
"""Rounds of answers before the measured ones; the choice takes some twenty steps of each request to settle."""


@dataclass(frozen=True, slots=True)
class OverlapOptions:
    """delays_ms: added to a round trip. concurrency: requests at once. max_tokens: length of every answer."""

    delays_ms: tuple[float, ...] = (0.0, 0.1, 1.0, 5.0, 20.0)
    concurrency: tuple[int, ...] = (4, 8)
    repetitions: int = 5
    max_tokens: int = 64


@dataclass(slots=True)
class Cell:
    """One delay and one number of requests: tokens per second of each repetition, by arrangement."""

    delay_ms: float
    requests: int
    rates: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in ARRANGEMENTS})
    groups_chosen: int = 1

    def ratios(self, name: str) -> list[float]:
        """Rates relative to one group of the same repetition."""
        return [a / b for a, b in zip(self.rates[name], self.rates["1_group"], strict=True)]


@dataclass(slots=True)
class Answers:
    """What a set of concurrent requests got, and how long it took together."""

    seconds: float
    texts: list[tuple[int, ...]]

    @property
    def tok_s(self) -> float:
        return sum(map(len, self.texts)) / self.seconds


def run(
    build: Callable[[str], Spark], worker: str, options: OverlapOptions, log: Callable[[str], None]
) -> dict[str, object]:
    """Measure; returns the result object (see docs/reference/benchmarks.md for the keys).

    Args:
        build: makes a Spark rank, not started, whose worker is at the address that it is given.
        worker: tcp:// address of a worker that is ready.
    """
    with DelayedLink(worker) as link:
        spark = build(link.endpoint)
        spark.engine.start()
        try:
            _await_link(spark)
            cells = [
                _measure(spark, link, Cell(delay, requests), options, log)
                for delay in options.delays_ms
                for requests in options.concurrency
            ]
        finally:
            spark.engine.stop()
    return _result(spark, cells, options, relay_hop_us())


def _await_link(spark: Spark) -> None:
    link = spark.engine.link
    if link is None or not link.wait_up(LINK_TIMEOUT_S):
        error = "there is no link" if link is None else link.last_error
        raise RuntimeError(f"the drafter worker did not come up in {LINK_TIMEOUT_S:.0f} s: {error}")


def _measure(spark: Spark, link: DelayedLink, cell: Cell, options: OverlapOptions, log: Callable[[str], None]) -> Cell:
    link.delay(cell.delay_ms)
    spark.engine.groups.forget()
    expected = None
    names = list(ARRANGEMENTS)
    for repetition in range(-WARM_UPS, options.repetitions):
        turn = repetition % len(names)
        for name in names[turn:] + names[:turn]:
            spark.engine.groups.fixed = ARRANGEMENTS[name]
            answers = _answer(spark, cell.requests, options.max_tokens)
            expected = expected or answers.texts
            if answers.texts != expected:
                raise RuntimeError(f"{name}: another text than before, at temperature 0")
            if repetition >= 0:
                cell.rates[name].append(answers.tok_s)
    cell.groups_chosen = spark.engine.groups.settled(cell.requests)
    log(f"{cell.delay_ms:g} ms, {cell.requests} requests: {_progress(cell)}")
    return cell


def _progress(cell: Cell) -> str:
    medians = ", ".join(f"{name} {statistics.median(rates):.1f}" for name, rates in cell.rates.items())
    ratios = ", ".join(f"{name} {statistics.median(cell.ratios(name)):.3f}x" for name in ("2_groups", "auto"))
    return f"{medians} tok/s; {ratios}"


def _answer(spark: Spark, requests: int, max_tokens: int) -> Answers:
    """Submit that many prompts at once and wait for all answers."""
    prompts = PROMPT_SETS["self"][:requests]
    sinks: list[queue.SimpleQueue[Delta]] = [queue.SimpleQueue() for _ in prompts]
    started = time.perf_counter()
    for number, (prompt, sink) in enumerate(zip(prompts, sinks, strict=True)):
        text = spark.tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, seed=number)
        ids = tuple(spark.tokenizer.encode(text))
        spark.engine.submit(GenerateRequest(f"overlap-{number}", ids, params), sink.put)
    texts = [_text(sink) for sink in sinks]
    return Answers(time.perf_counter() - started, texts)


def _text(sink: queue.SimpleQueue[Delta]) -> tuple[int, ...]:
    ids: list[int] = []
    while True:
        delta = sink.get()
        ids += delta.token_ids
        if delta.finish_reason in (FINISH_ERROR, FINISH_ABORT):
            raise RuntimeError(f"the engine failed: {delta.error}")
        if delta.finish_reason is not None:
            return tuple(ids)


def relay_hop_us() -> float:
    """What the relay adds to a round trip at zero delay: median microseconds, against the same echo without it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=_echo, args=(server, 2), daemon=True)
        thread.start()
        port = server.getsockname()[1]
        direct = _echo_us(port)
        with DelayedLink(f"tcp://127.0.0.1:{port}") as link:
            relayed = _echo_us(int(link.endpoint.rpartition(":")[2]))
        thread.join(LINK_TIMEOUT_S)
    return relayed - direct


def _echo(server: socket.socket, connections: int) -> None:
    for _ in range(connections):
        with server.accept()[0] as peer:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while data := peer.recv(4096):
                peer.sendall(data)


def _echo_us(port: int) -> float:
    times = []
    with socket.create_connection(("127.0.0.1", port)) as end:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(ECHOES):
            started = time.perf_counter()
            end.sendall(bytes(512))
            received = 0
            while received < 512:
                received += len(end.recv(4096))
            times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e6


def _result(spark: Spark, cells: list[Cell], options: OverlapOptions, hop_us: float) -> dict[str, object]:
    result: dict[str, object] = {
        "model": spark.model_name,
        **spark.facts,
        "delays_ms": list(options.delays_ms),
        "concurrency": list(options.concurrency),
        "repetitions": options.repetitions,
        "max_tokens": options.max_tokens,
        "relay_adds_us": round(hop_us, 1),
    }
    for cell in cells:
        place = f"{cell.delay_ms:g}ms_n{cell.requests}"
        for name, rates in cell.rates.items():
            result[f"tok_s_{name}_{place}"] = round(statistics.median(rates), 2)
        for name in ("2_groups", "auto"):
            ratios = cell.ratios(name)
            result[f"speedup_{name}_{place}"] = round(statistics.median(ratios), 3)
            result[f"speedup_range_{name}_{place}"] = [round(min(ratios), 3), round(max(ratios), 3)]
        result[f"groups_chosen_{place}"] = cell.groups_chosen
    for delay in options.delays_ms:
        for name in ("2_groups", "auto"):
            here = [ratio for cell in cells if cell.delay_ms == delay for ratio in cell.ratios(name)]
            result[f"speedup_{name}_{delay:g}ms"] = round(statistics.median(here), 3)
    return result


def as_json(result: dict[str, object]) -> str:
    return json.dumps(result, indent=1)


def as_table(result: dict[str, object]) -> str:
    """The same figures for people."""
    lines = [
        f"{result['model']} ({result['dtype']}, {result['device']}), depth {result['num_speculative_tokens']}, "
        f"{result['repetitions']} repetitions x {result['max_tokens']} tokens, T = 0",
        f"the relay itself adds {result['relay_adds_us']} us to a round trip",
        "",
        "".join(title.rjust(9) for title in COLUMNS),
    ]
    delays: list[float] = result["delays_ms"]  # type: ignore[assignment]
    concurrency: list[int] = result["concurrency"]  # type: ignore[assignment]
    for delay in delays:
        for requests in concurrency:
            place = f"{delay:g}ms_n{requests}"
            rates = [f"{result[f'tok_s_{name}_{place}']:>9}" for name in ARRANGEMENTS]
            two, auto = (result[f"speedup_{name}_{place}"] for name in ("2_groups", "auto"))
            chosen = result[f"groups_chosen_{place}"]
            lines.append(f"{delay:>9g}{requests:>9}{''.join(rates)}{two:>9}{auto:>9}{chosen:>9}")
    return "\n".join(lines)
