"""etcd's own commands about its members, over its gateway for JSON. pyetcd lacks learners.

Each call tries the given endpoints in order. It returns values, and raises StoreUnavailableError or StoreRefusedError.
"""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastrain.launcher.quorum.certificates import Pair
from elastrain.launcher.store.port import StoreRefusedError, StoreUnavailableError

_ANSWER_BYTES_MAX = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Listed:
    """A member as etcd lists it. `name` and `client` are "" until it has started."""

    id: str
    name: str
    peer: str
    client: str
    is_learner: bool


class EtcdAdmin:
    """A client for etcd's members. Each attempt at one endpoint takes up to `timeout_s`."""

    def __init__(self, pair: Pair, timeout_s: float = 1.0) -> None:
        self._context = pair.context(server=False, least=ssl.TLSVersion.TLSv1_2)  # etcd 3.5 speaks no newer one
        self._timeout_s = timeout_s

    def members(self, endpoints: Sequence[str]) -> tuple[Listed, ...]:
        """Return the members that a majority has agreed on."""
        answer = self._ask(endpoints, "/v3/cluster/member/list", {"linearizable": True})
        return _members(answer)

    def leader(self, endpoint: str) -> str:
        """Return the id of the leader that this member knows, "0" for none."""
        return str(self._ask([endpoint], "/v3/maintenance/status", {}).get("leader", "0"))

    def add_learner(self, endpoints: Sequence[str], peer: str) -> tuple[Listed, ...]:
        """Add a learner with this peer address. Returns all members with it."""
        body = {"peerURLs": [f"https://{peer}"], "isLearner": True}
        return _members(self._ask(endpoints, "/v3/cluster/member/add", body))

    def promote(self, endpoints: Sequence[str], member: str) -> None:
        """Let a learner vote."""
        self._ask(endpoints, "/v3/cluster/member/promote", {"ID": member})

    def remove(self, endpoints: Sequence[str], member: str) -> None:
        """Remove a member."""
        self._ask(endpoints, "/v3/cluster/member/remove", {"ID": member})

    def _ask(self, endpoints: Sequence[str], path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        trouble = "no endpoint is known"
        for endpoint in endpoints:
            try:
                status, answer = self._post(endpoint, path, body)
            except (OSError, http.client.HTTPException, ValueError) as error:
                trouble = f"{endpoint}: {error}"
                continue
            if status == http.client.OK:
                return answer
            trouble = f"{endpoint}: {answer.get('message', status)}"
            if status < http.client.INTERNAL_SERVER_ERROR:
                raise StoreRefusedError(f"the quorum refuses: {trouble}")
        raise StoreUnavailableError(f"the quorum does not answer ({trouble})")

    def _post(self, endpoint: str, path: str, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        host, _, port = endpoint.rpartition(":")
        connection = http.client.HTTPSConnection(
            host.strip("[]"), int(port), timeout=self._timeout_s, context=self._context
        )
        try:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            found = json.loads(answer.read(_ANSWER_BYTES_MAX))
            return answer.status, found if isinstance(found, dict) else {}
        finally:
            connection.close()


def _members(answer: Mapping[str, Any]) -> tuple[Listed, ...]:
    return tuple(
        Listed(
            id=str(member["ID"]),
            name=str(member.get("name", "")),
            peer=_address(member.get("peerURLs", [])),
            client=_address(member.get("clientURLs", [])),
            is_learner=bool(member.get("isLearner", False)),
        )
        for member in answer.get("members", [])
    )


def _address(urls: Sequence[str]) -> str:
    return urls[0].removeprefix("https://") if urls else ""
