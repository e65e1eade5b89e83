"""The exchange between shards of an attention rank, and how they leave a step or each other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from moe_serve.pipeline.costs.micro_batch_choice import MAX_MICRO_BATCHES
from moe_serve.pipeline.links.shard_group import ShardGroup, ShardLostError, StepAbandonedError
from tests.support.families.sharded_logits import connected


def columns(group: ShardGroup, num_rows: int, width: int) -> Tensor:
    return torch.full((num_rows, width), float(group.shard.index))


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize(("num_rows", "width"), [(1, 1), (0, 4), (300, 257), (5, 0)])
def test_everybody_has_all_columns(count: int, num_rows: int, width: int) -> None:
    """Widths differ, and many exchanges follow each other, so the links' memory is used again."""
    widths = tuple(width + index for index in range(count))

    def run(group: ShardGroup) -> list[Tensor]:
        if group.is_leader:
            group.order(b"step")
        else:
            assert group.next_order() == b"step"
        found = []
        for _ in range(40):
            part = columns(group, num_rows, widths[group.shard.index])
            found.append(group.everywhere(part, widths))
        found.append(group.at_leader(part, widths))
        return found

    with connected(count) as members, ThreadPoolExecutor(count) as pool:
        results = list(pool.map(run, members))
    wanted = torch.arange(count).repeat_interleave(torch.tensor(widths)).float()
    for result in results:
        assert all(torch.equal(x, wanted.expand(num_rows, -1)) for x in result[:-1])
    assert torch.equal(results[0][-1], wanted.expand(num_rows, -1)), "the leader has all logits"


def test_nobody_is_further_ahead_of_the_leader_than_a_link_holds() -> None:
    """The leader alone gets the logits of each micro-batch behind a dense layer, and does not
    answer. One frame more would overwrite memory that it has not read."""
    part = torch.ones(300, 1)  # too long for the notice itself
    with connected(2) as (leader, other), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(other.everywhere, part, (1, 1))
        leader.everywhere(part, (1, 1))
        waiting.result(60.0)
        assert MAX_MICRO_BATCHES <= 6
        for number in range(6):
            other.at_leader(part * number, (1, 1))
        with pytest.raises(AssertionError, match="8 messages to a leader"):
            other.at_leader(part, (1, 1))
        for number in range(6):
            assert torch.equal(leader.at_leader(part, (1, 1))[:, 1:], part * number)
        leader.order(b"step")
        assert other.next_order() == b"step"
        other.at_leader(part, (1, 1))  # the next step's first


@pytest.mark.parametrize("num_done", [0, 1, 3])
def test_a_step_may_be_given_up_anywhere(num_done: int) -> None:
    """The others leave it at any point, and do not mistake the next step for it."""

    def lead(group: ShardGroup) -> list[float]:
        found = []
        for step in range(5):
            group.order(b"step")
            for _ in range(num_done if step % 2 else 6):
                found.append(
                    float(group.everywhere(torch.full((3, 1), float(step)), (1,) * 3).sum())
                )
            if step % 2:
                group.abandon()
        group.order(b"end")
        return found

    def follow(group: ShardGroup) -> int:
        num_given_up, step = 0, 0
        while group.next_order() == b"step":
            try:
                for _ in range(6):
                    total = group.everywhere(torch.full((3, 1), float(step)), (1,) * 3)
                    assert float(total.sum()) == 9.0 * step, f"of another step than {step}"
            except StepAbandonedError:
                num_given_up += 1
            step += 1
        return num_given_up

    with connected(3) as members, ThreadPoolExecutor(3) as pool:
        leading = pool.submit(lead, members[0])
        following = [pool.submit(follow, member) for member in members[1:]]
        assert [f.result() for f in following] == [2, 2]
        assert leading.result()[0] == 0.0


def test_a_step_that_has_ended_here_cannot_be_left() -> None:
    """The leader failed after the last exchange, for example in the sampler."""
    with connected(2) as (leader, other), ThreadPoolExecutor(1) as pool:
        leader.order(b"a")
        assert other.next_order() == b"a"
        leader.abandon()
        waiting = pool.submit(other.next_order)
        leader.order(b"b")
        assert waiting.result(60.0) == b"b"


def test_the_end_of_a_shard_wakes_the_others() -> None:
    with connected(3) as (leader, second, third), ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(g.everywhere, torch.zeros(1, 1), (1, 1, 1)) for g in (leader, third)]
        second.close()
        with pytest.raises(ShardLostError, match=r"attention-0\.1 is lost"):
            waiting[0].result(60.0)
        leader.close()  # as it does: the rank is lost
        with pytest.raises(ShardLostError):
            waiting[1].result(60.0)


def test_a_silent_shard_is_lost_in_time() -> None:
    why = r"attention-0\.1 is lost .*silent for 0\.1 s"
    with connected(2, timeout_s=0.1) as members, pytest.raises(ShardLostError, match=why):
        members[0].everywhere(torch.zeros(1, 1), (1, 1))
