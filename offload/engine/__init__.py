"""One training step over streamed units.

To read one step, from the call to the updated weights, in order:

    engine/engine.py                  the public calls
    engine/steps.py                   a step: batch, loss, the method of training
    engine/methods/backward.py        forward, backward, update; or, without gradients, forwards.py
    engine/loss/batch_agreement.py    what ranks tell each other of a batch first
    engine/loss/parts.py              the loss in parts, each with its backward
    engine/units/unit.py              a module whose parameters travel, its forward rerouted
    engine/units/router.py            where a call of it goes
    engine/units/arguments.py         what it is called with
    engine/units/traits.py            what is known of it; micro-batches
    engine/units/call.py              one use: forward, and backward with a recompute
    engine/units/runner.py            its weights up, its module run, its room for others
    engine/units/saved_inputs.py      what waits for the backward
    engine/units/recompute_policy.py  whether its graph is kept
    engine/units/saved_graph.py       and how
    schedule/execute.py               which fetch comes next
    tiers/slots.py                    memory on the device for weights
    tiers/store.py                    where states are; tiles and leases
    tiers/nvme.py                     those on disk
    lanes/ticket.py                   what waits for what
    lanes/lane.py                     queues of work beside compute
    engine/gradients/flow.py          a gradient from autograd to where it waits
    engine/gradients/landing.py       and on its way down
    engine/gradients/norms.py         what is known of all of them
    engine/gradients/updates.py       clipping, and the update of every tile
    optim/update.py                   runs of parameters that are updated alike
    native/kernels.py                 the kernels

What comes before the first step: `assemble.py`, `state.py`, `take_over.py`, `recording/`, `judging.py`. What ends
it otherwise: `recovery.py`. Own loops: `own_loop.py`.
"""
