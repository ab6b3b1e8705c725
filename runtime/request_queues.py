"""Where each live request stands: waiting or running, each in the order of service, or following its leader.

The order is strict: (priority, arrival). It decides nothing; the scheduler moves requests about.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pageframe.runtime.request import Request, RequestStatus


class RequestQueues:
    """All live requests, and the last `keep_finished` that ended.

    `waiting` and `running` may be read by anyone. A request that follows a leader, which computes the prompt of a
    request's choices for all of them, is in neither.
    """

    def __init__(self, keep_finished: int) -> None:
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self._live: dict[str, Request] = {}
        self._finished: deque[Request] = deque(maxlen=keep_finished)

    def __len__(self) -> int:
        """Live requests."""
        return len(self._live)

    def live(self) -> list[Request]:
        """Running requests in the order of service, then waiting ones, then those that follow."""
        queued = [*self.running, *self.waiting]
        return [*queued, *(follower for leader in queued for follower in leader.followers)]

    def get(self, request_id: str) -> Request | None:
        """A live request."""
        return self._live.get(request_id)

    def find(self, request_id: str) -> Request | None:
        """A live request, or the one of this id that ended last."""
        ended = (request for request in reversed(self._finished) if request.request_id == request_id)
        return self._live.get(request_id) or next(ended, None)

    def rows(self) -> npt.NDArray[np.int32]:
        """Rows of the running requests, in the order of service."""
        return np.fromiter((request.row for request in self.running), dtype=np.int32, count=len(self.running))

    def later_than(self, request: Request) -> list[Request]:
        """Running requests that stand behind `request` in the order."""
        return self.running[bisect_right(self.running, request.order, key=_order) :]

    def ahead_of(self, request: Request) -> str:
        """The id of who stands before a live request in the order of service, or of the leader that it follows; "" for
        nobody."""
        if request.leader is not None:
            return request.leader.request_id
        is_running = request.status is RequestStatus.RUNNING
        queue = self.running if is_running else self.waiting
        place = bisect_left(queue, request.order, key=_order)
        before = queue[:place] or ([] if is_running else self.running)
        return before[-1].request_id if before else ""

    # ---- moving about ---------------------------------------------------------------------------------------------

    def add(self, choices: Sequence[Request]) -> None:
        """New requests: the first leads the others. The caller queues it."""
        leader, *followers = choices
        for request in choices:
            assert request.request_id not in self._live, f"request id {request.request_id} is live already"
            self._live[request.request_id] = request
        self._lead(leader, followers)

    def _lead(self, leader: Request, followers: list[Request]) -> None:
        leader.leader, leader.followers = None, followers
        for follower in followers:
            follower.leader = leader

    def wait(self, request: Request) -> None:
        """It stands among those that wait, in its place."""
        request.status = RequestStatus.WAITING
        insort(self.waiting, request, key=_order)

    def run(self, request: Request) -> None:
        """It stands among those that run, in its place."""
        request.status = RequestStatus.RUNNING
        insort(self.running, request, key=_order)

    def leave(self, request: Request) -> None:
        """It stands nowhere for now."""
        if request.leader is not None:
            request.leader.followers.remove(request)
            request.leader = None
            return
        queue = self.running if request.status is RequestStatus.RUNNING else self.waiting
        place = bisect_left(queue, request.order, key=_order)
        if place < len(queue) and queue[place] is request:
            del queue[place]

    def release_followers(self, leader: Request) -> list[Request]:
        """The prompt is computed: those who followed stand on their own, nowhere for now."""
        followers = leader.followers
        self._lead(leader, [])
        for follower in followers:
            follower.leader = None
        return followers

    def hand_over(self, leader: Request) -> Request:
        """A leader ends before its prompt is computed: the first who followed leads the rest. The caller queues it."""
        heir, *others = leader.followers
        self._lead(leader, [])
        self._lead(heir, others)
        return heir

    def end(self, request: Request) -> None:
        """It is no longer live."""
        request.status = RequestStatus.FINISHED
        del self._live[request.request_id]
        self._finished.append(request)

    def check_invariants(self) -> None:
        """A live request stands in exactly one place; both queues are in order."""
        for queue, status in ((self.waiting, RequestStatus.WAITING), (self.running, RequestStatus.RUNNING)):
            orders = [request.order for request in queue]
            assert orders == sorted(orders), f"those {status.value} are out of order"
            assert all(request.status is status for request in queue)
            assert all(request.leader is None for request in queue), "one who follows is queued"
        assert sorted(request.request_id for request in self.live()) == sorted(self._live), (
            "a live request must be in exactly one queue"
        )
        for leader in (*self.waiting, *self.running):
            assert all(follower.leader is leader for follower in leader.followers)
        assert all(request.row == -1 for request in self.live() if request.status is RequestStatus.WAITING)


def _order(request: Request) -> tuple[int, int]:
    return request.order
