"""What several attention ranks count, summed, also after one of them is lost."""

from __future__ import annotations

from dataclasses import replace

from moe_serve.config.sections import CacheConfig
from tests.support.cluster.fault_drive import FaultDrive, undisturbed
from tests.support.cluster.layouts import config, requests
from tests.support.cluster.thread_starter import ThreadStarter

VOCAB_SIZE = 4096  # of the demonstration model


def test_counts_of_ranks() -> None:
    of = config(2, 1)
    small = replace(of.model, max_model_len=128)
    of = replace(of, model=small, cache=CacheConfig(num_pages=14, metrics_sample=1.0))
    wanted = requests(9, VOCAB_SIZE)
    again = [replace(one, request_id=f"again-{one.request_id}") for one in wanted]
    num_tokens = sum(len(one.prompt_token_ids) for one in wanted)
    with FaultDrive(of, ThreadStarter) as drive:
        assert drive.serve(wanted) == undisturbed(of, wanted)
        first = drive.engine.stats().counts
        assert first.num_missed_tokens + first.num_hit_tokens == num_tokens
        engines = drive.engine._engines.values()
        each = [engine.stats().counts.num_missed_tokens for engine in engines]
        assert sum(each) == first.num_missed_tokens and min(each) > 0, "both had some"

        def lose() -> None:
            drive.membership.give_up("attention-0", "the test took it")

        drive.serve(again, lose)
        counts = drive.engine.stats().counts
        assert drive.membership.num_lost == 1
        assert counts.num_missed_tokens + counts.num_hit_tokens == 2 * num_tokens, "once for each"
        sampled = sum(counts.page_times.lifetime.counts)
        assert sampled == counts.num_evicted_pages > first.num_evicted_pages > 0
