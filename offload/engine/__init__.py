"""One training step over streamed units.

Reading order for the main path (thirteen files, about 4,200 lines):

    engine/engine.py               Engine.step: the public call
    engine/steps.py                Steps.step: agree with the other ranks, record new calls, make the step
    engine/methods/method.py       Backward.step: forward, backward, update
    engine/loss/parts.py           Losses.total: run the model, and the backward of each loss
    engine/units/unit.py           Unit.route: forward for a module with streamed weights
    engine/units/call.py           Router.stream: a unit call with backward or without;
                                   UnitCall: one unit use in the outer autograd graph, forward and backward
    engine/units/keep.py           Inputs: what a use keeps until its backward, and the recomputation
    engine/units/runner.py         UnitRunner.enter, run, leave: fetch weights, run the module, free the slot
    schedule/execute.py            Executor.enter: choose the next fetches
    tiers/slots.py                 Slots.fetch: copy weights to the device (H2D copy)
    engine/gradients/flow.py       GradientFlow.take: take a gradient out of autograd
    engine/gradients/transfer.py   GradientTransfer.send: choose the memory of a gradient until the update;
                                   Exchange.reduce, land: sum over ranks, copy to the host (D2H copy)
    engine/gradients/updates.py    Updates.clip_gradients, start_rest: norm, clipping, update

Helpers of the main path:

    engine/loss/batch_agreement.py agreement between ranks before a pass
    engine/units/stages.py         the forward for a use: the module's own, within the stages of extras
    engine/compile_wrappers.py     removes torch.compile wrappers from a model
    engine/units/arguments.py      unit call arguments, each tensor listed once
    engine/units/traits.py         recorded unit properties; tensor splits into micro-batches
    engine/units/saved_inputs.py   unit inputs saved for the backward, on the device or offloaded
    engine/units/recompute_policy.py   which saved autograd graphs fit;
    engine/units/saved_graph.py, offloaded_graph.py   their memory
    tiers/store.py, tile.py, lease.py   state storage; leases on tiles and their lifetime
    tiers/nvme.py                  states on disk
    lanes/ticket.py, lanes.py, threads.py   dependencies between work items; work queues beside compute
    engine/gradients/norms.py      global gradient norm
    engine/gradients/policies.py   update timing: at once, deferred, speculative, delayed
    engine/gradients/tile_updates.py   tile updates, and their place
    optim/update.py, native/kernels.py   update rule arithmetic

Other paths through a step: `offload/extras/zeroth` trains without gradients; `own_loop.py` is for loops that call the
model themselves. Before the first step: `prepare.py`, `assemble.py`, `state.py` with its three owners `memory.py`,
`weights.py` and `flow.py`, `recording/`, `equivalence_checks.py`. After a failed step: `recovery.py`.
"""
