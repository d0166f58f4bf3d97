"""All processes of a service in virtual time, and the supervisor that starts them, reaps them and starts them anew.

Knows who lives; decides nothing: the cores are the production's. At time 0 all have said hello and tested the ways
between them, as after a start in peace; from then on everything takes its time, restarts included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from cbdisagg.config import Config
from cbdisagg.core.coordinator import CoordinatorCore
from cbdisagg.core.effects import Effect, Note, Tell, Wake
from cbdisagg.core.events import FromCoordinatorInbox, FromWorkerInbox, Leave, Verified
from cbdisagg.core.profile import Profile
from cbdisagg.messages import (
    Address,
    Generate,
    Lead,
    Members,
    Message,
    PeerDown,
    Reported,
    RequestId,
    Return,
    Suspect,
    Up,
)
from cbdisagg.sim.bus import Bus
from cbdisagg.sim.clients import Clients, Record
from cbdisagg.sim.clock import Clock
from cbdisagg.sim.faults import COORDINATOR, Fault
from cbdisagg.sim.fleet import Layout, Place, describe, places, ways
from cbdisagg.sim.links import Link, Links
from cbdisagg.sim.machine import Machine
from cbdisagg.sim.network import Network
from cbdisagg.sim.shell import Observer, Shell

HOST = "host-0"
"""Where the coordinator, the api and the supervisor are."""
SETTLING_S = 0.1
"""A coordinator that starts hears for so long of those that live before its supervisor says that these were all."""


class Coordinator:
    """A process: the production core. `routed` is called with each request that it decides on, and how."""

    def __init__(
        self,
        address: Address,
        config: Config,
        clock: Clock,
        network: Network,
        observer: Observer | None,
        routed: Callable[[RequestId, str], None],
    ) -> None:
        self.address, self.host = address, HOST
        self._routed = routed
        self.core = CoordinatorCore(address, config)
        self.shell = Shell(self.core, self, clock, network, None, observer)

    def receive(self, sender: Address, message: Message) -> None:
        before = self.core.decisions.copy()
        self.shell.handle(FromCoordinatorInbox(sender, message))  # type: ignore[arg-type]  # sent to a coordinator
        if isinstance(message, Generate | Return):
            id = message.id if isinstance(message, Generate) else message.request.id
            for (kind, reason), _ in self.core.decisions.items() - before.items():
                self._routed(id, f"{kind}: {reason}")


class Service:
    """Itself the supervisor's process. `ended` is called at the end of each request.

    `reap_s`, `restart_s`: from a death until its supervisor says so, and until a successor has loaded the model.
    `observer` sees every event of every core, with its effects.
    """

    def __init__(
        self,
        config: Config,
        profile: Profile,
        layout: Layout,
        ended: Callable[[Record], None],
        *,
        reap_s: float = 0.01,
        restart_s: float = 10.0,
        observer: Observer | None = None,
    ) -> None:
        self.clock = Clock()
        event_s = profile.host.event_s
        self.network = Network(self.clock, layout.near_s + event_s, layout.far_s + event_s)
        self.address, self.host = Address("supervisor", 1, ""), HOST
        self.machines: dict[int, Machine] = {}
        self.gone: list[Machine] = []
        self._config, self._profile, self._observer = config, profile, observer
        self._reap_s, self._restart_s = reap_s, restart_s
        self._incarnation = 10
        self._places = {place.name: place for place in places(config, layout)}
        every = list(self._places.values())
        self._links = Links(profile, layout, every, ways(every))
        self._buses = {place.host: self._bus() for place in every}
        self._downs: list[PeerDown] = []
        self._coordinator_notes: list[tuple[float, str, Note]] = []
        self.network.join(self)
        self.clients = self._start_clients(ended)
        self.coordinator = self._start_coordinator()
        for place in self._places.values():
            self._start_machine(place)
        self._introduce()

    @property
    def notes(self) -> list[tuple[float, str, Note]]:
        """(when, whose, what) the cores have noted, by time."""
        machines = [*self.gone, *self.machines.values()]
        told = [(at, machine.address.name, note) for machine in machines for at, note in machine.shell.notes]
        told += [(at, COORDINATOR, note) for at, note in self.coordinator.shell.notes]
        return sorted([*self._coordinator_notes, *told], key=lambda each: each[0])

    # ------------------------------------------------------------------------------------------------ starting

    def _incarnate(self, name: str) -> Address:
        self._incarnation += 1
        return Address(name, self._incarnation, "")

    def _start_clients(self, ended: Callable[[Record], None]) -> Clients:
        config = self._config
        clients = Clients(
            self._incarnate("api"),
            HOST,
            self.clock,
            self.network,
            config.targets,
            config.kv.page_size,
            hash_pages=config.kv.prefix_cache,
            profile=self._profile,
            bus=self._buses[HOST],
            ended=ended,
        )
        self.network.join(clients)
        return clients

    def _bus(self) -> Bus | None:
        """Of one host; None: nobody slows anybody there."""
        profile, host = self._profile, self._profile.host
        if not (profile.beside_step or profile.beside_push or host.cores):
            return None
        return Bus(self.clock, profile.beside_step, profile.beside_push, host.cores, max(1, profile.threads))

    def _start_coordinator(self) -> Coordinator:
        address = self._incarnate(COORDINATOR)
        coordinator = Coordinator(address, self._config, self.clock, self.network, self._observer, self.clients.route)
        self.network.join(coordinator)
        return coordinator

    def _start_machine(self, place: Place) -> Machine:
        profile = self._profile
        address = self._incarnate(place.name)
        machine = Machine(
            describe(place, address.incarnation, self._config, profile),
            self._config,
            profile,
            self.clock,
            self.network,
            self._buses[place.host],
            self.machines.get,
            self._link,
            self._observer,
        )
        self.machines[address.incarnation] = machine
        self.network.join(machine)
        return machine

    def _link(self, source: Address, to: Address) -> Link | None:
        return self._links.between(source.name, to.name)

    def _introduce(self) -> None:
        """The start in peace, at once: hello, the ways tested, and then the one broadcast that tells all of it."""
        self._tell_who_lives()
        lead = FromWorkerInbox(self.address, Lead(self.coordinator.address))
        self.clients.receive(self.address, lead.message)
        for machine in self.machines.values():
            self._pass_on(machine, machine.core.handle(lead, 0.0))
        infos = tuple(machine.info for machine in self.machines.values())
        members = Members(self.coordinator.address.incarnation, (self.clients.address,), infos, (), ())
        by_name = {machine.address.name: machine for machine in self.machines.values()}
        for machine in self.machines.values():
            self._pass_on(machine, machine.core.handle(FromWorkerInbox(self.address, members), 0.0))
        for source, to in sorted(self._links.ways):
            link = self._links.between(source, to)
            assert link is not None
            verified = Verified(by_name[source].address, link.kind, link.cost.B, "")
            self._pass_on(by_name[to], by_name[to].core.handle(verified, 0.0))
        self.coordinator.receive(self.address, Reported(HOST))

    def _pass_on(self, machine: Machine, effects: list[Effect]) -> None:
        """What a worker tells the coordinator while all start; its self-tests are taken to be done."""
        for effect in effects:
            if isinstance(effect, Tell) and effect.to == self.coordinator.address:
                self.coordinator.receive(machine.address, effect.message)
            elif isinstance(effect, Wake):
                machine.shell.wake(effect.at)

    def _tell_who_lives(self) -> None:
        self.coordinator.receive(self.address, Up(self.clients.address, "api", 0))
        for machine in self.machines.values():
            self.coordinator.receive(self.address, Up(machine.address, "worker", 0))
        for down in self._downs:
            self.coordinator.receive(self.address, down)

    # ---------------------------------------------------------------------------------------------- supervising

    def receive(self, sender: Address, message: Message) -> None:
        if isinstance(message, Suspect) and message.incarnation in self.machines:
            self.kill(self.machines[message.incarnation])

    def strike(self, fault: Fault) -> None:
        """Now. Whoever bears the name; nobody does while its successor starts."""
        if fault.target == COORDINATOR:
            self._replace_coordinator()
            return
        machine = next((each for each in self.machines.values() if each.address.name == fault.target), None)
        if machine is None:
            return
        match fault.kind:
            case "kill":
                self.kill(machine)
            case "leave":
                machine.shell.handle(Leave())
                self._await_retirement(machine)
            case "slow":
                machine.slow = fault.factor

    def kill(self, machine: Machine) -> None:
        """What it has sent may still arrive. It is reaped, and a successor loads the model."""
        self._bury(machine)
        self.clock.after(self._reap_s, self._reap, machine.address, "worker")
        self.clock.after(self._restart_s, self._restart, machine.address.name)

    def _bury(self, machine: Machine) -> None:
        del self.machines[machine.address.incarnation]
        self.network.leave(machine)
        machine.die()
        self.gone.append(machine)

    def _reap(self, address: Address, kind: Literal["worker", "coordinator"]) -> None:
        down = PeerDown(address.name, address.incarnation, "killed", kind)
        self._downs.append(down)
        self.network.send(self, self.coordinator.address, down)

    def _restart(self, name: str) -> None:
        machine = self._start_machine(self._places[name])
        self.network.send(self, self.coordinator.address, Up(machine.address, "worker", 0))
        self.network.send(self, machine.address, Lead(self.coordinator.address))

    def _await_retirement(self, machine: Machine) -> None:
        """It ends when nothing is left to do there, or after limits.drain_s."""
        machine.on_retire = lambda: self.clock.after(self._reap_s, self._retire, machine)
        self.clock.after(self._config.limits.drain_s, self._retire, machine)

    def _retire(self, machine: Machine) -> None:
        if machine.address.incarnation in self.machines:
            self.kill(machine)

    def _replace_coordinator(self) -> None:
        old = self.coordinator
        self.network.leave(old)
        old.shell.close()
        self._coordinator_notes += [(at, COORDINATOR, note) for at, note in old.shell.notes]
        self.coordinator = self._start_coordinator()
        self._reap(old.address, "coordinator")
        self._tell_who_lives()
        followers = [self.clients.address, *(machine.address for machine in self.machines.values())]
        for address in followers:
            self.network.send(self, address, Lead(self.coordinator.address))
        self.clock.after(SETTLING_S, self._report, self.coordinator.address)

    def _report(self, coordinator: Address) -> None:
        self.network.send(self, coordinator, Reported(HOST))
