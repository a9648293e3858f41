"""The life of a collective unrolled, for speed alone: read `call` first, the steps are numbered as there.

It runs a blocking call while no other communication of the rank is in progress, so there is nothing to advance
meanwhile; every address is looked up once, and no `Call` is made. For small arrays that takes a third of the time.
"""

from __future__ import annotations

from functools import partial
from sys import byteorder
from time import perf_counter_ns
from typing import Any

from simparallel.clock.event import COMPUTE
from simparallel.comm.call_group import CallGroup
from simparallel.comm.call_header import COPIED, OWN_ARRAY
from simparallel.comm.memory.segment import WORD
from simparallel.comm.plan import CallPlan
from simparallel.comm.transport import order
from simparallel.comm.views import ARRIVE, DONE_MARK


def run_at_once(group: CallGroup, plan: CallPlan, x: Any, out: Any, must_copy: bool) -> Any:
    """Run one collective whose body does not wait; arguments and result as in `Group.run`."""
    start_ns = perf_counter_ns()
    transport, recorder, views = group.transport, group.recorder, group.views
    words, memory, site = transport.words, transport.memory, transport.call_site(4)
    seq = group.seq = group.seq + 1
    parity = seq & 1
    (site_at, sim_at, offset_at, exposure_at, seq_at, arrive_at, arrivals, headers, offsets, exposures, sims) = (
        views.offsets[parity]
    )
    try:
        # Steps 1 and 2, expose and publish. Where the last call of this parity had the same plan, the header is
        # still there, and only the words of the note that change are written.
        zero_copy, given = False, x
        if plan.in_slot:
            if plan.exposes:
                words[offset_at] = views.show(plan, parity, x)
        else:
            words[offset_at], zero_copy, given = views.offer(plan, parity, x, must_copy)
            words[exposure_at] = OWN_ARRAY if zero_copy else COPIED
        if views.published[parity] is not plan:
            views.publish(plan, parity)
        words[site_at] = site
        if recorder is not None:
            now_ps, until_ps = recorder.clock_ps[COMPUTE], recorder.clock_ps.get(group.stream, 0)
            if recorder.launcher is not None:
                now_ps = recorder.issue()
            words[sim_at] = now_ps if now_ps > until_ps else until_ps
        words[seq_at] = seq
        # Steps 3 and 4, arrive and wait. One comparison of bytes covers the marks of all members. Equality is
        # enough: no member's mark can be ahead, because the next collective uses the mark of the other parity.
        order()
        words[arrive_at] = seq
        transport.notify(arrive_at)
        arrived = seq.to_bytes(WORD, byteorder)
        arrived = arrived * views.size if views.is_dense else views.spread(arrived)
        if memory[arrivals] != arrived and not transport.sees(arrivals, arrived):
            transport.wait((views.condition(ARRIVE + parity, seq),), partial(group.describe, plan, seq, site))
        order()
        # Step 5, compare. Equal headers are equal bytes; if they differ, `agree` applies the level of checking.
        if memory[headers] != plan.expected and not views.agree(plan, parity):
            raise group.header_error(parity)
        # Step 6, the body.
        # Slots are at fixed offsets, so their views are found by parity without a look at the peers' notes.
        payloads = plan.payloads.get(parity) if plan.in_slot else None
        if payloads is None:
            payloads = views.payloads(plan, parity, offsets(words))
        result = plan.body.result(payloads, given, out)
        # Step 7, done.
        if not plan.copied and OWN_ARRAY in exposures(words):
            views.mark(DONE_MARK, seq)
            if zero_copy:
                transport.wait((views.condition(DONE_MARK, seq),), partial(group.describe, plan, seq, site))
    except BaseException as error:
        # The life was cut off in an unknown state, so the lane raises this error from now on.
        group.lane.fail(error)
        if isinstance(error, KeyboardInterrupt):
            transport.interrupted(views.condition(ARRIVE + parity, seq), partial(group.describe, plan, seq, site))
        raise
    # Step 8, the event.
    if recorder is not None:
        size_bytes, cost = plan.price or group.price(plan, parity)
        sim_start_ps = max(sims(words))
        sim_end_ps = sim_start_ps + cost.time_ps
        recorder.communicate(
            plan.op,
            "collective",
            group.stream,
            start_ns,
            perf_counter_ns(),
            sim_start_ps,
            sim_end_ps,
            size_bytes,
            cost.sent_bytes,
            group.ranks,
            seq,
            (),
            cost.algorithm,
        )
        # A blocking call keeps the device waiting until its simulated end; an async one does so in `Work.wait`.
        recorder.join(sim_end_ps)
    return result
