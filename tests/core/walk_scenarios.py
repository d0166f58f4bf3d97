"""The small worlds that are walked: what each of them is for, and the bounds within which it is exhausted.

Two requests, two attempts each or more, of two or three tokens; pages hold two. Everything that crosses between the
workers comes in every order. Who is `prompt` in one scenario is late in another: with nobody prompt the same faults
are walked for one request.
"""

from __future__ import annotations

from core_world import Setting
from walk import Scenario
from walk_world import APIS, COORDINATORS, TARGETS, WORKER, Ask, Asked

from cbdisagg.config import Config, Kv, Policy, Scheduler
from cbdisagg.messages import Sampling, Targets

SPLIT, CROSSED, ALONE = ("prefill", "decode"), ("any", "any"), ("any",)
PROMPT = (APIS, COORDINATORS)
DECODER = range(2 * WORKER, 3 * WORKER)
KILL_P, KILL_D, RESTART_P, RESTART_D = "kill prefill-0", "kill decode-1", "restart prefill-0", "restart decode-1"


def setting(
    roles: tuple[str, ...] = SPLIT,
    *,
    pages: int = 8,
    kind: str = "shm",
    plans_ahead: int = 0,
    budget: int = 8,
    cache: bool = False,
    max_batch: int = 3,
    checksums: bool = False,
) -> Setting:
    config = Config(
        kv=Kv(prefix_cache=cache),
        scheduler=Scheduler(token_budget=budget),
        policy=Policy(mode="disaggregate", suspect_s=1e9, silent_s=1e9),
    )
    return Setting(
        roles,  # type: ignore[arg-type]
        config,
        pages=pages,
        max_batch=max_batch,
        plans_ahead=plans_ahead,
        checksums=checksums,
        kind=lambda prefill, decode: kind,
    )


def asked(*prompts: str, tokens: int = 2, targets: Targets = TARGETS) -> Asked:
    """Prompts as digits, one token each."""
    return tuple(Ask(tuple(map(int, prompt)), Sampling(max_tokens=tokens), targets=targets) for prompt in prompts)


ONE, TWO = asked("123"), asked("123", "221")
LONG = asked("12312", "22")  # the first has three pages, pushed one by one with a budget of two tokens
STAY = asked("123", tokens=4)  # decodes for a while
HURRIED = asked("123", "221", tokens=3, targets=Targets(0.5, 0.001))  # a first token waits whenever a step runs

SCENARIOS = [
    Scenario("cancel", setting(), TWO, {"cancel": 2}, most=2, prompt=PROMPT, floor=9_200),
    Scenario("cancel, workers late", setting(), TWO, {"cancel": 1}, prompt=(APIS,), floor=4_200),
    Scenario("cancel in mid-transfer", setting(budget=2), LONG, {"cancel": 2}, most=2, prompt=PROMPT, floor=24_000),
    Scenario("P dies and comes back", setting(), TWO, {KILL_P: 1, RESTART_P: 1}, most=2, prompt=PROMPT, floor=6_100),
    Scenario("P dies, all late", setting(), ONE, {KILL_P: 1, "cancel": 1}, most=2, floor=5_400),
    Scenario(
        "P dies twice", setting(), ONE, {KILL_P: 2, RESTART_P: 1, "cancel": 1}, most=4, prompt=PROMPT, floor=9_600
    ),
    Scenario("D dies and comes back", setting(), TWO, {KILL_D: 1, RESTART_D: 1}, most=2, prompt=PROMPT, floor=7_600),
    Scenario("D dies, all late", setting(), ONE, {KILL_D: 1, "cancel": 1}, most=2, floor=9_700),
    Scenario(
        "D dies twice", setting(), ONE, {KILL_D: 2, RESTART_D: 1, "cancel": 1}, most=4, prompt=PROMPT, floor=6_800
    ),
    Scenario("both die, all late", setting(), ONE, {KILL_P: 1, KILL_D: 1}, most=2, floor=3_500),
    Scenario("P is suspected", setting(budget=2), LONG[:1], {"suspect prefill-0": 1}, prompt=PROMPT, floor=4_100),
    Scenario("P is suspected, all late", setting(), ONE, {"suspect prefill-0": 1}, floor=14_000),
    Scenario(
        "D is suspected", setting(), ONE, {"suspect decode-1": 1, "cancel": 1}, most=2, prompt=PROMPT, floor=2_800
    ),
    Scenario("a message is lost", setting(), TWO, {"lose": 1}, prompt=PROMPT, floor=11_000),
    Scenario("anything is lost, all late", setting(ALONE), ONE, {"lose anywhere": 1, "cancel": 1}, most=2, floor=6_800),
    Scenario("anything is lost", setting(), ONE, {"lose anywhere": 1}, prompt=(APIS,), floor=4_200),
    Scenario("anything is lost, api late", setting(), ONE, {"lose anywhere": 1}, prompt=(COORDINATORS,), floor=5_100),
    Scenario("coordinator", setting(), ONE, {"coordinator": 1}, prompt=PROMPT, floor=9_800),
    Scenario(
        "coordinator, P and api late", setting(), ONE, {"coordinator": 1}, prompt=(COORDINATORS, DECODER), floor=20_000
    ),
    Scenario("coordinator, all late", setting(ALONE), ONE, {"coordinator": 1, "cancel": 1}, most=2, floor=14_000),
    Scenario("coordinator, P late", setting(), TWO, {"coordinator": 1}, prompt=(*PROMPT, DECODER), floor=5_000),
    Scenario("coordinator twice", setting(ALONE), ONE, {"coordinator": 2}, most=2, prompt=(APIS,), floor=4_100),
    Scenario("coordinator and worker", setting(ALONE), ONE, {"coordinator": 1, "kill any-0": 1}, most=2, floor=4_000),
    Scenario("data apart", setting(kind="zmq", budget=2), LONG, {KILL_P: 1, "cancel": 1}, prompt=PROMPT, floor=9_800),
    Scenario(
        "data apart, suspicion",
        setting(kind="zmq"),
        ONE,
        {"suspect prefill-0": 1, "cancel": 1},
        most=2,
        prompt=PROMPT,
        floor=11_000,
    ),
    Scenario(
        "one fits", setting(pages=3), TWO, {"cancel": 1, KILL_P: 1, KILL_D: 1}, most=2, prompt=PROMPT, floor=7_800
    ),
    Scenario("crossed", setting(CROSSED), TWO, {"cancel": 1, "kill any-0": 1}, prompt=PROMPT, floor=6_400),
    Scenario(
        "crossed, no room",
        setting(CROSSED, pages=2),
        asked("123", "221", tokens=1),
        {"cancel": 1, "kill any-0": 1},
        most=2,
        prompt=PROMPT,
        floor=2_800,
    ),
    Scenario("ahead", setting(plans_ahead=1), TWO, {"cancel": 2}, most=2, prompt=PROMPT, floor=15_000),
    Scenario("ahead, P dies", setting(plans_ahead=1), TWO, {KILL_P: 1}, prompt=PROMPT, floor=1_200),
    Scenario(
        "preemption",
        setting(pages=4),
        asked("123", "221", tokens=4),
        {"cancel": 1, KILL_P: 1},
        prompt=PROMPT,
        floor=5_800,
    ),
    Scenario(
        "preemption, ahead",
        setting(pages=4, plans_ahead=1),
        asked("123", "221", tokens=4),
        {"cancel": 1, KILL_D: 1},
        prompt=PROMPT,
        floor=6_900,
    ),
    Scenario(
        "preemption of the last",
        setting(CROSSED, pages=3),
        asked("123", "22", "1", tokens=4),
        prompt=PROMPT,
        floor=5_200,
    ),
    Scenario("api", setting(), TWO, {"api": 1}, floor=2_000),
    Scenario(
        "prefix", setting(cache=True), asked("1231", "1232"), {"cancel": 1, KILL_P: 1}, prompt=PROMPT, floor=1_300
    ),
    Scenario(
        "hit",
        setting(pages=16, cache=True),
        asked("123", "123331112223"),
        {"cancel": 1, KILL_P: 1},
        prompt=PROMPT,
        floor=3_600,
    ),
    Scenario(
        "crossed prefix", setting(CROSSED, cache=True), asked("1231", "1232"), {"cancel": 1}, prompt=PROMPT, floor=3_700
    ),
    Scenario(
        "one token", setting(), asked("123", "22", tokens=1), {"cancel": 1, KILL_P: 1}, most=2, prompt=PROMPT, floor=600
    ),
    Scenario("checksums", setting(checksums=True), TWO, {"cancel": 1, KILL_P: 1}, prompt=PROMPT, floor=2_700),
    Scenario("first waits", setting(), HURRIED, {"cancel": 2}, most=2, prompt=PROMPT, floor=45_000),
    Scenario("first waits, P dies", setting(), HURRIED, {KILL_P: 1, RESTART_P: 1}, most=2, prompt=PROMPT),
    Scenario(
        "first waits, checksums",
        setting(checksums=True),
        HURRIED,
        {"cancel": 1, KILL_P: 1},
        prompt=PROMPT,
        floor=11_000,
    ),
    Scenario(
        "first waits, ahead, data apart",
        setting(kind="zmq", plans_ahead=1),
        HURRIED,
        {"cancel": 1, KILL_P: 1},
        prompt=PROMPT,
        floor=14_000,
    ),
    Scenario("first waits, no room", setting(pages=4), HURRIED, {"cancel": 1, KILL_P: 1}, prompt=PROMPT, floor=5_800),
    Scenario("first waits, leaves", setting(CROSSED), HURRIED, {"leave any-0": 1}, prompt=PROMPT, floor=16_000),
    Scenario("first waits, api", setting(), HURRIED, {"api": 1}, floor=6_900),
    Scenario("leaves", setting(CROSSED), STAY, {"leave any-0": 1, "cancel": 1}, most=2, prompt=PROMPT, floor=6_000),
    Scenario(
        "leaves, ahead",
        setting(CROSSED, plans_ahead=1),
        STAY,
        {"leave any-0": 1, "cancel": 1},
        most=2,
        prompt=PROMPT,
        floor=6_600,
    ),
    Scenario(
        "leaves, data apart",
        setting(CROSSED, kind="zmq"),
        STAY,
        {"leave any-0": 1, "cancel": 1},
        most=2,
        prompt=PROMPT,
        floor=2_900,
    ),
    Scenario("leaves, api late", setting(CROSSED), STAY, {"leave any-0": 1}, prompt=(COORDINATORS,), floor=11_000),
    Scenario(
        "leaves, dies",
        setting(CROSSED),
        STAY,
        {"leave any-0": 1, "kill any-0": 1, "kill any-1": 1},
        most=2,
        prompt=PROMPT,
        floor=1_200,
    ),
    Scenario(
        "both leave", setting(CROSSED), STAY, {"leave any-0": 1, "leave any-1": 1}, most=2, prompt=PROMPT, floor=1_000
    ),
    Scenario("flow", setting(CROSSED), STAY, {"relieve any-0": 1, "cancel": 1}, most=2, prompt=PROMPT, floor=4_900),
    Scenario(
        "flow there and back",
        setting(CROSSED),
        STAY,
        {"relieve any-0": 2, "relieve any-1": 1},
        most=3,
        prompt=PROMPT,
        floor=430,
    ),
    Scenario(
        "flow, ahead, data apart",
        setting(CROSSED, kind="zmq", plans_ahead=1),
        STAY,
        {"relieve any-0": 1, "cancel": 1},
        most=2,
        prompt=PROMPT,
        floor=2_300,
    ),
    Scenario(
        "flow, leaves",
        setting(CROSSED),
        STAY,
        {"relieve any-0": 1, "leave any-0": 1, "leave any-1": 1},
        most=2,
        prompt=PROMPT,
        floor=2_850,
    ),
    Scenario(
        "flow, dies",
        setting(CROSSED),
        STAY,
        {"relieve any-0": 1, "kill any-0": 1, "kill any-1": 1},
        most=2,
        prompt=PROMPT,
        floor=1_300,
    ),
]

LARGE = [
    Scenario("first waits, P is suspected", setting(), HURRIED, {"suspect prefill-0": 1}, prompt=PROMPT, floor=710_000),
    Scenario("cancel, all late", setting(), TWO, {"cancel": 1}, floor=17_000),
    Scenario("P dies, two, all late", setting(), TWO, {KILL_P: 1}, floor=160_000),
    Scenario("D dies, two, all late", setting(), TWO, {KILL_D: 1}, floor=460_000),
    Scenario("anything is lost, two workers, all late", setting(), ONE, {"lose anywhere": 1}, floor=36_000),
    Scenario("two things are lost", setting(ALONE), ONE, {"lose anywhere": 2}, most=2, floor=79_000),
    Scenario(
        "lost, and the coordinator", setting(ALONE), ONE, {"lose anywhere": 1, "coordinator": 1}, most=2, floor=230_000
    ),
    Scenario(
        "lost in a move",
        setting(CROSSED),
        STAY,
        {"leave any-0": 1, "lose anywhere": 1},
        most=2,
        prompt=PROMPT,
        floor=11_000,
    ),
    Scenario("losses", setting(), TWO, {"lose": 1, "cancel": 1}, most=2, prompt=PROMPT, floor=160_000),
    Scenario("coordinator and P late", setting(), ONE, {"coordinator": 1}, prompt=(APIS, DECODER), floor=3_200),
    Scenario(
        "coordinator, workers and api late", setting(), ONE, {"coordinator": 1}, prompt=(COORDINATORS,), floor=330_000
    ),
    Scenario(
        "workers die and come back",
        setting(),
        TWO,
        {KILL_P: 1, RESTART_P: 1, KILL_D: 1, RESTART_D: 1, "cancel": 1},
        most=2,
        prompt=PROMPT,
        floor=31_000,
    ),
    Scenario(
        "data apart, losses",
        setting(kind="zmq", budget=2),
        LONG[:1],
        {"suspect prefill-0": 1, "lose": 1},
        most=2,
        prompt=PROMPT,
        floor=74_000,
    ),
    Scenario(
        "ahead, two faults",
        setting(plans_ahead=1),
        TWO,
        {"cancel": 1, KILL_P: 1, KILL_D: 1},
        most=2,
        prompt=PROMPT,
        floor=36_000,
    ),
    Scenario(
        "crossed, two faults",
        setting(CROSSED, pages=4),
        TWO,
        {"cancel": 1, "kill any-0": 1},
        most=2,
        prompt=PROMPT,
        floor=16_000,
    ),
    Scenario(
        "leaves, suspected",
        setting(CROSSED),
        STAY,
        {"leave any-0": 1, "suspect any-0": 1},
        most=2,
        prompt=PROMPT,
        floor=19_000,
    ),
    Scenario(
        "leaves, coordinator",
        setting(CROSSED),
        STAY,
        {"leave any-0": 1, "coordinator": 1},
        most=2,
        prompt=(*PROMPT, DECODER),
        floor=23_000,
    ),
    Scenario("leaves, all late", setting(CROSSED), STAY, {"leave any-0": 1}, floor=69_000),
    Scenario(
        "leaves, dies, api late",
        setting(CROSSED),
        STAY,
        {"leave any-0": 1, "kill any-0": 1, "kill any-1": 1},
        most=2,
        prompt=(COORDINATORS,),
        floor=38_000,
    ),
    Scenario(
        "leaves, two", setting(CROSSED), asked("123", "221", tokens=4), {"leave any-0": 1}, prompt=PROMPT, floor=28_000
    ),
    Scenario(
        "flow, lost",
        setting(CROSSED),
        STAY,
        {"relieve any-0": 1, "lose anywhere": 1},
        most=2,
        prompt=PROMPT,
        floor=2_900,
    ),
    Scenario(
        "flow, coordinator",
        setting(CROSSED),
        STAY,
        {"relieve any-0": 1, "coordinator": 1},
        most=2,
        prompt=(*PROMPT, DECODER),
        floor=37_000,
    ),
]

BY_NAME = {scenario.name: scenario for scenario in SCENARIOS + LARGE}
