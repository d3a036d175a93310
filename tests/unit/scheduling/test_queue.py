import pytest

from freetoken.messages import SamplingParams
from freetoken.scheduling.queue import RequestQueue
from freetoken.scheduling.request import Request


def request(name, priority, arrival):
    return Request(
        name, (1,), SamplingParams(), priority=priority, arrival=arrival, max_context_tokens=10, eos_token_ids=(), now=0
    )


def test_orders_by_priority_then_arrival_whatever_the_order_of_insertion():
    queue = RequestQueue()
    items = [request("c", 1, 1), request("b", 0, 3), request("a", 0, 2)]
    for item in items:
        queue.add(item)
    assert [item.id for item in queue] == ["a", "b", "c"]
    assert queue[-1].id == "c" and len(queue) == 3 and items[1] in queue
    queue.remove(items[1])
    assert [item.id for item in queue] == ["a", "c"] and items[1] not in queue
    with pytest.raises(ValueError, match="b is not in this queue"):
        queue.remove(items[1])
    queue.clear()
    assert len(queue) == 0 and items[0] not in queue
