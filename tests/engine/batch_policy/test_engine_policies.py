"""Policies in a real engine: the same tokens under all of them, and signatures that arrive."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from numpy.typing import NDArray

from fake_runner import continuation
from layouts import Answer, colocated, config, serve
from moe_serve.config import EngineConfig, SchedulerConfig
from moe_serve.engine.batch_policy.live_signatures import FollowedPredictor, LiveSignatures
from moe_serve.engine.batch_policy.recall_floor import RecallFloor
