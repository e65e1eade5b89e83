"""Setup for every test: one thread for the math, no configuration from the environment, and the
same drawn examples on every machine."""

from __future__ import annotations

import functools
import gc
import os
import signal
import ssl
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support.forks import popen
from tests.support.sampled_cases import EVERY_CASE, drop_unsampled

# Thousands of tests and their imports live to the end: looking through them for garbage while they
# are collected would take a third of that time.
gc.disable()
# Before torch is first imported: the suite must run the same on two cores and on two hundred.
for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Before anybody imports triton (transformers does): without a GPU its kernels are interpreted, and
# its own functions count from the moment they are decorated.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# A shell starts background jobs with SIGINT ignored, and that is inherited: servers that tests
# start must hear their Ctrl-C all the same.
signal.signal(signal.SIGINT, signal.default_int_handler)
# A client's context reads the certificates of all authorities, for about 20 ms of a core: clients
# that are made the same way share one.
ssl.create_default_context = functools.cache(ssl.create_default_context)
# Drawn examples neither change from run to run nor depend on how fast the machine is; others are
# drawn with `--hypothesis-profile default`.
settings.register_profile(
    "same", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("same")

pytest_plugins = ["tests.support.forks.workers"]

popen.use(popen.Template())


@pytest.hookimpl(trylast=True)  # after -k and -m: of the cases that they leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not EVERY_CASE:
        drop_unsampled(items, config)


def pytest_collection_finish() -> None:
    """Keeps the collected tests and imported modules out of later garbage collections, because
    they live until the end."""
    gc.freeze()  # with a little garbage: to look for it would take a second


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Switches garbage collection on, for the tests."""
    gc.enable()


@pytest.fixture(autouse=True)
def _no_configuration_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MOE_SERVE_")]:
        monkeypatch.delenv(name)
