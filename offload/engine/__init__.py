"""One training step over streamed units.

The main line, to be read in this order: twelve files, some 3,000 lines.

    engine/engine.py               Engine.step: the public call
    engine/steps.py                Steps.step: agree with the other ranks, record what is new, make the step
    engine/methods/backward.py     Backward.step: forward, backward, update
    engine/loss/parts.py           Losses.parts: the model runs, and its loss comes in parts
    engine/units/unit.py           Unit.route: the forward of a module whose weights travel
    engine/units/call.py           Call: one use of a unit, its forward, and its backward with a recompute
    engine/units/runner.py         UnitRunner.enter, run, leave: weights up, the module runs, room for others
    schedule/execute.py            Executor.enter: which fetches come next
    tiers/slots.py                 Slots.fetch: the copy of weights into device memory
    engine/gradients/flow.py       GradientFlow.take: a gradient leaves autograd
    engine/gradients/landing.py    Landing.land: a gradient goes down to where it waits
    engine/gradients/updates.py    Updates.apply: the norm, clipping, the update

What is met on the way:

    engine/loss/batch_agreement.py what the ranks tell each other before a pass
    engine/units/router.py         where a unit's call goes: with a backward or without, or into a recording
    engine/units/forwards.py       what runs in a use: the module's own forward, or a compiled one
    engine/units/uncompiled.py     what torch.compile has put around a model, taken off
    engine/units/arguments.py      what a unit is called with, each tensor listed once
    engine/units/traits.py         what is known of a unit; how its tensors are cut into micro-batches
    engine/units/saved_inputs.py   what waits for the backward, on the device or put away
    engine/units/recompute_policy.py, saved_graph.py   whether a use keeps its graph, and how
    tiers/store.py, tile.py, lease.py   where states rest; what is lent of them, and for how long
    tiers/nvme.py                  states on disk
    lanes/ticket.py, lane.py       what waits for what; queues of work beside compute
    engine/gradients/norms.py      the norm of all gradients
    engine/gradients/policies.py   when gradients become updates: at once, deferred, speculative, delayed
    engine/gradients/tile_updates.py, update_place.py   the update of each tile, and where it runs
    optim/update.py, native/kernels.py   the rule's arithmetic

Other ways through a step: `methods/forwards.py` trains without gradients; `own_loop.py` is for loops that call the
model themselves. Before the first step: `assemble.py`, `state.py`, `take_over.py`, `recording/`, `judging.py`. Where a
step ends otherwise: `recovery.py`. The calls about states: `state_access.py`.
"""
