"""Both ends of a protected link as a user starts them: CURVE with dense rows, TLS with a secret; and a wrong secret."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from openai import OpenAI

from dspark.launch import READY_PREFIX
from tests.conftest import TinyPair, worker_arguments
from tests.link_keys import make_keys

START_S = 90.0
SECRET = "--secret-file"


@dataclass
class Child:
    """A `dspark` process; `lines` is what it has said."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)

    def read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    def wait_for(self, pattern: str) -> str:
        """The first group of the first line that matches."""
        until = time.monotonic() + START_S
        while time.monotonic() < until and self.process.poll() is None:
            for line in list(self.lines):
                if found := re.search(pattern, line):
                    return found.group(1)
            time.sleep(0.05)
        raise AssertionError("\n".join(self.lines))


@contextmanager
def child(*arguments: str) -> Iterator[Child]:
    process = subprocess.Popen(
        [sys.executable, "-m", "dspark.cli", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    started = Child(process)
    reader = threading.Thread(target=started.read, daemon=True)
    reader.start()
    try:
        yield started
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join(5)


@contextmanager
def served(
    pair: TinyPair, scheme: str, worker: Sequence[str], spark: Sequence[str], speculative: str
) -> Iterator[tuple[str, Child]]:
    """The endpoint's URL, once the verifier listens, and the verifier."""
    with ExitStack() as stack:
        listen = ["--listen", f"{scheme}://127.0.0.1:0"]
        drafter = stack.enter_context(child("worker", *listen, *worker_arguments(pair), *worker))
        address = drafter.wait_for(f"{READY_PREFIX}(.*)")
        options = ["--target", str(pair.target), "--dtype", "fp32", "--threads", "1", "--slots", "4"]
        options += ["--max-context", "256", "--port", "0", "--speculative-config", speculative]
        verifier = stack.enter_context(child("spark", "--worker", address, *options, *spark))
        yield verifier.wait_for(r"ready: (http\S+)"), verifier


def accepted(url: str) -> float:
    with urllib.request.urlopen(url + "/metrics", timeout=10) as response:
        text = response.read().decode()
    (value,) = re.findall(r"^dspark:spec_decode_num_accepted_tokens_total (\S+)$", text, re.M)
    return float(value)


def ask(url: str) -> str:
    client = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=60, max_retries=0)
    answer = client.completions.create(
        model="target", prompt=[3, 14, 15, 92], max_tokens=40, temperature=0.8, seed=5, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 40
    return answer.choices[0].text


def secret(directory: Path, name: str, text: str) -> str:
    path = directory / name
    path.write_text(text, "utf-8")
    path.chmod(0o600)
    return str(path)


def test_curve_and_dense_rows_from_the_command_line(tiny_pair: TinyPair, tmp_path: Path) -> None:
    keys = make_keys(tmp_path).curve
    worker = ["--curve-secret-key", str(keys / "worker"), "--curve-clients", str(keys / "allowed")]
    spark = ["--curve-secret-key", str(keys / "spark"), "--curve-server-key", str(keys / "worker.pub")]
    with served(tiny_pair, "tcp", worker, spark, tiny_pair.speculative(draft_support="dense")) as (url, _):
        ask(url)
        assert accepted(url) > 0


def test_tls_and_a_secret_from_the_command_line(tiny_pair: TinyPair, tmp_path: Path) -> None:
    keys = make_keys(tmp_path).tls
    if keys is None:
        pytest.skip("no openssl program here to make certificates")
    same = [SECRET, secret(tmp_path, "secret", "sixteen bytes or more"), "--tls-ca", str(keys / "ca.pem")]
    worker, spark = (
        [*same, "--tls-certificate", str(keys / f"{name}.pem"), "--tls-key", str(keys / f"{name}.key")]
        for name in ("worker", "spark")
    )
    with served(tiny_pair, "tls+tcp", worker, spark, tiny_pair.speculative()) as (url, _):
        ask(url)
        assert accepted(url) > 0


def test_a_wrong_secret_serves_the_target_alone(tiny_pair: TinyPair, tmp_path: Path) -> None:
    right = [SECRET, secret(tmp_path, "right", "sixteen bytes or more")]
    wrong = [SECRET, secret(tmp_path, "wrong", "sixteen other bytes!!")]
    with served(tiny_pair, "plain+tcp", right, wrong, tiny_pair.speculative()) as (url, verifier):
        ask(url)
        assert accepted(url) == 0
        assert verifier.wait_for("does not answer yet.*(auth_failed)") == "auth_failed"
