"""What every life of every rank has in common, and the orders for one life made of it. A value."""

from __future__ import annotations

from dataclasses import dataclass

from cores.config import UNIX_SOCKETS, EngineConfig, EngineLaunch, FrontEndAddress, Transport
from cores.messages import RankId


@dataclass(frozen=True, slots=True)
class RankPlan:
    engine: EngineConfig
    control_address: str
    front_ends: tuple[FrontEndAddress, ...]
    num_threads: int
    first_rank: int
    ready_timeout_s: float
    log_level: str = "info"
    transport: Transport = UNIX_SOCKETS
    log_format: str = "text"

    def launch(self, rank_id: RankId) -> EngineLaunch:
        return EngineLaunch(
            rank=rank_id.rank,
            epoch=rank_id.epoch,
            local_rank=rank_id.rank - self.first_rank,
            config=self.engine,
            control_address=self.control_address,
            front_ends=self.front_ends,
            num_threads=self.num_threads,
            log_level=self.log_level,
            transport=self.transport,
            log_format=self.log_format,
        )
