"""How states move in a simulation: to the device, from there as gradients, and through their updates.

Where the engine does it: `Slots._bring_up`, `Landing.land`, `Updates._enter`, `InPlace` and `OnDevice`, `Record`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from offload.lanes.ticket import Fence, Ticket
from offload.layout.regions import DiskLayout, Region, Sharding, align
from offload.schedule.virtual_lanes import Compute, VirtualLanes
from offload.schedule.virtual_states import Seconds, VirtualTile, ring_of, taken, virtual_region
from offload.tiers.ring import Stretch

_RING_ALIGNMENT = 512


@dataclass(frozen=True)
class Memory:
    """Bytes of the rings through which states and gradients pass; 0 for one that there is none of.

    gradients: on the device, from a backward to the landing. staging: on the host, for gradients that do not wait.
    shards: on the device, for sums over ranks. fetches, updates, activations: on the host, from and to disk.
    device_updates: on the device, for states of the host that are updated there.
    """

    gradients: int
    staging: int = 0
    shards: int = 0
    fetches: int = 0
    updates: int = 0
    activations: int = 0
    device_updates: int = 0


class VirtualStates:
    """Every region's states, and what is done with them.

    `seconds` says by link what bytes take: "h2d", "d2h", "update", "nvme_read", "nvme_write", "collective"; of updates
    on the device of states of the host "update_on_device"; and of what compute does itself, "here". `on_device`: the
    states rest on the device, where compute updates them.
    """

    def __init__(
        self,
        regions: Sequence[Region],
        layout: DiskLayout,
        memory: Memory,
        seconds: Mapping[str, Seconds],
        lanes: VirtualLanes,
        compute: Compute,
        *,
        on_device: bool,
        keeps_gradients: bool,
        inline: bool,
    ) -> None:
        """`inline`: copies and updates are made by compute itself, but for those of the disk."""
        self._layout, self._seconds, self._lanes, self._compute = layout, seconds, lanes, compute
        self._on_device, self._keeps, self._inline = on_device, keeps_gradients, inline
        self._streams = memory.device_updates > 0
        self.of = {region.index: virtual_region(region, layout) for region in regions}
        self.buffer = ring_of(memory.gradients, "gradient buffer")
        self._staging, self._shards = ring_of(memory.staging, "gradient staging"), ring_of(memory.shards, "shards")
        self._fetches, self._updates = ring_of(memory.fetches, "fetch ring"), ring_of(memory.updates, "update ring")
        self._ring = ring_of(memory.device_updates, "device update ring")
        self.nvme_written_bytes = 0

    @property
    def _sharding(self) -> Sharding:
        return self._layout.sharding

    # -- lanes -----------------------------------------------------------------------------------------------

    def submit(
        self, lane: str, link: str, num_bytes: int, reads: Sequence[Ticket] = (), fills: Sequence[Ticket] = ()
    ) -> Ticket:
        """Submit work of so many bytes, or do it at once where lanes are compute."""
        seconds = self._seconds[link](num_bytes)
        if not self._inline:
            return self._lanes.submit(lane, seconds, reads, fills)
        self._compute.compute_after((*reads, *fills))
        self._compute.run(seconds)
        return self._done()

    def _here(self, link: str, num_bytes: int, reads: Sequence[Ticket]) -> Ticket:
        """Let compute itself do work on states of the device."""
        self._compute.compute_after(reads)
        self._compute.run(self._seconds[link](num_bytes))
        return next(iter(self._compute.mark()), None) or self._done()

    def _done(self) -> Ticket:
        return Ticket("compute", self._lanes.now, self._lanes.now, is_done=True)

    def exchange(self, num_bytes: int, reads: Sequence[Ticket], fills: Sequence[Ticket] = ()) -> Ticket:
        """Exchange with the other ranks: so many bytes of this one's."""
        if self._on_device:
            return self._here("collective", num_bytes, (*reads, *fills))
        return self.submit("collective", "collective", num_bytes, reads, fills)

    # -- weights ---------------------------------------------------------------------------------------------

    def bring_up(self, region: Region, fills: Sequence[Ticket], is_whole: bool = False) -> list[Ticket]:
        """Bring a region's weights to the device, and what other ranks hold of them. `is_whole`: with what of the
        master weights rides along.
        """
        rides = self._layout.rides(region) if is_whole else ()
        held = () if self._on_device else self.of[region.index].held
        tickets = [self._fetch(tile, fills, sum(plane.num_bytes(tile.numel) for plane in rides)) for tile in held]
        if self._sharding.gathers:
            return [self.exchange(region.weight_bytes // self._sharding.size, tickets or fills)]
        return tickets

    def _fetch(self, tile: VirtualTile, fills: Sequence[Ticket], beside_bytes: int) -> Ticket:
        weight_bytes = tile.region.plane("weights").num_bytes(tile.numel)
        fence = tile.fence if tile.shown is None else tile.shown
        reads, stretch = fence.before_read(), None
        if "weights" in tile.disk:
            recent = tile.recent
            if recent is not None and recent.is_whole:
                stretch, reads = recent, (*reads, *recent.fence.before_read())
            else:
                stretch, reading = self._read(tile, "fetch", tile.disk["weights"], [tile.record])
                reads = (*reads, reading)
        ticket = self.submit("h2d", "h2d", weight_bytes + beside_bytes, reads, fills)
        fence.read(ticket)
        if stretch is not None:
            stretch.fence.read(ticket)
            stretch.is_open = False
        return ticket

    def _read(self, tile: VirtualTile, purpose: str, num_bytes: int, fences: Sequence[Fence]) -> tuple[Stretch, Ticket]:
        """Read from disk into the ring of fetches or updates."""
        stretch = taken(self._fetches if purpose == "fetch" else self._updates, num_bytes)
        before = [ticket for fence in fences for ticket in fence.before_read()]
        reading = self._lanes.submit(f"{purpose}_read", self._seconds["nvme_read"](num_bytes), before, stretch.fills)
        stretch.fence.fill(reading)
        for fence in fences:
            fence.read(reading)
        if purpose == "update":
            tile.recent = stretch
        return stretch, reading

    def _write(self, stretch: Stretch, num_bytes: int, changed: Ticket, fence: Fence) -> None:
        """Write the beginning of a stretch to where a fence stands for."""
        if num_bytes:
            seconds = self._seconds["nvme_write"](num_bytes)
            writing = self._lanes.submit("update_write", seconds, (changed,), fence.before_fill())
            stretch.fence.read(writing)
            fence.fill(writing)
            self.nvme_written_bytes += num_bytes
        stretch.is_open = False

    # -- gradients -------------------------------------------------------------------------------------------

    def land(self, region: Region, source: Fence) -> tuple[Fence, list[Ticket]]:
        """Bring a region's gradients to where they wait; return the fence of that place, and all tickets. A stretch of
        staging is lent until the next one is taken.
        """
        state, plane = self.of[region.index], region.plane("gradients")
        reads: Sequence[Ticket] = self._compute.mark()
        if self._sharding.size > 1:
            source, reads = self._reduce(region, source, reads)
        own = sum(tile.numel for tile in state.tiles)
        if "gradients" in state.tiles[0].disk:
            return Fence("on disk"), [self._land_on_disk(tile, source, reads) for tile in state.tiles]
        if self._on_device:
            return state.landing, [self._here("here", plane.num_bytes(own), reads)]
        if self._keeps:
            fence, fills = state.landing, state.landing.before_fill()
        else:
            stretch = taken(self._staging, plane.num_bytes(own))
            fence, fills = stretch.fence, stretch.fills
            stretch.is_open = False
        ticket = self.submit("d2h", "d2h", plane.num_bytes(own), reads, fills)
        fence.fill(ticket)
        source.read(ticket)
        return fence, [ticket]

    def _reduce(self, region: Region, source: Fence, reads: Sequence[Ticket]) -> tuple[Fence, Sequence[Ticket]]:
        """Sum a region's gradients over ranks; return the fence of the sum, and after what it is there."""
        shard_bytes, fence = 4 * region.numel // self._sharding.size, source
        fills: Sequence[Ticket] = ()
        if self._shards.memory.nbytes and region.is_bf16:
            stretch = taken(self._shards, shard_bytes)
            stretch.is_open = False
            fence, fills = stretch.fence, stretch.fills
        # In stage 0 the sums are gathered as well.
        ticket = self.exchange((2 if self._sharding.num_ranges == 1 else 1) * shard_bytes, reads, fills)
        source.read(ticket)
        if fence is not source:
            fence.fill(ticket)
        return fence, (ticket,)

    def _land_on_disk(self, tile: VirtualTile, source: Fence, reads: Sequence[Ticket]) -> Ticket:
        stretch = taken(self._updates, tile.disk["gradients"])
        tile.recent = None
        num_bytes = tile.region.plane("gradients").num_bytes(tile.numel)
        ticket = self.submit("d2h", "d2h", num_bytes, reads, stretch.fills)
        stretch.fence.fill(ticket)
        source.read(ticket)
        self._write(stretch, tile.disk["gradients"], ticket, tile.landing)
        return ticket

    # -- updates ---------------------------------------------------------------------------------------------

    def update_in_slot(self, region: Region) -> Ticket:
        """Let compute update a region in the slot in which it has come up; return when it is down again: as of
        `offload.engine.methods.pending`.
        """
        (tile,) = self.of[region.index].tiles
        done = self._here("here", region.update_bytes(tile.numel), tile.fence.before_fill())
        planes = (region.plane("weights"), *self._layout.rides(region))
        num_bytes = sum(plane.num_bytes(tile.numel) for plane in planes)
        down = self.submit("update_down", "d2h", num_bytes, (done,), tile.fence.before_fill())
        tile.fence.fill(down)
        return down

    def lend_early(self, region: Region) -> bool:
        """Read what will be updated first before the norm is known; False where the ring is full."""
        for tile in self.of[region.index].tiles:
            if tile.disk and tile.early is None:
                if not self._updates.has_room(tile.state_bytes):
                    return False
                tile.early, _ = self._read(tile, "update", tile.state_bytes, [tile.record])
        return True

    def update(self, region: Region, landed: Fence, publishes: bool = True) -> None:
        """Submit the update of a region, or its correction, behind its gradients. `publishes`: its weights are final,
        and go to the other ranks where these hold them too.
        """
        for number, tile in enumerate(self.of[region.index].tiles):
            ticket = self._update(tile, landed)
            if publishes and self._sharding.publishes:
                self.publish(region, number, ticket)

    def publish(self, region: Region, number: int, ticket: Ticket | None = None) -> None:
        """Give the new weights of a tile to the other ranks, after this ticket, and take theirs."""
        state, size = self.of[region.index], self._sharding.num_ranges
        own = state.tiles[number]
        num_bytes = region.plane("weights").num_bytes(own.numel)
        reads = own.fence.before_read() if ticket is None else (ticket,)
        others = state.others[number : number + 1]
        fills = [ticket for tile in others for ticket in tile.fence.before_fill()]
        sent = self.exchange(num_bytes * size // max(1, size - 1), reads, fills)
        own.fence.read(sent)
        for tile in others:
            tile.fence.fill(sent)

    def _update(self, tile: VirtualTile, landed: Fence) -> Ticket:
        region, on_disk = tile.region, "gradients" in tile.disk
        stretch, reads, fills = tile.early, [*tile.fence.before_read()], tile.fence.before_fill()
        tile.early = None
        if stretch is not None:
            reads += stretch.fence.before_read()
        elif tile.disk:
            fences = [tile.record, tile.landing] if on_disk else [tile.record]
            stretch, reading = self._read(tile, "update", sum(tile.disk.values()), fences)
            reads.append(reading)
        if tile.shown is not None:
            reads += tile.shown.before_read()
        reads += landed.before_read()
        num_bytes = region.update_bytes(tile.numel)
        if self._on_device:
            ticket = done = self._here("here", num_bytes, reads)
        elif self._streams:
            ticket, done = self._on_the_device(tile, reads, fills)
        else:
            ticket = done = self.submit("update", "update", num_bytes, reads, fills)
        landed.read(ticket)
        if tile.shown is not None:
            tile.shown.read(done)
        tile.fence.fill(done)
        if stretch is not None:
            stretch.fence.fill(done)
            self._write(stretch, tile.state_bytes, done, tile.record)
        return done

    def _on_the_device(
        self, tile: VirtualTile, reads: Sequence[Ticket], fills: Sequence[Ticket]
    ) -> tuple[Ticket, Ticket]:
        """Submit an update on the device of states of the host: return when they are up, and when down again."""
        region, stays = tile.region, self._layout.stays
        moved = [plane for plane in region.states if not stays(region, plane)]
        sizes = [plane.num_bytes(tile.numel) for plane in (*moved, region.plane("gradients"))]
        stretch = taken(self._ring, sum(align(size, _RING_ALIGNMENT) for size in sizes))
        up = self.submit("update_up", "h2d", sum(sizes), (*reads, *self._compute.mark()), stretch.fills)
        done = self.submit("update_on_device", "update_on_device", region.update_bytes(tile.numel), (up,))
        down = self.submit("update_down", "d2h", sum(sizes[:-1]), (done,), fills)
        stretch.fence.fill(down)
        stretch.is_open = False
        return up, down
