"""State that survives: `muster.State` in a training script.

`state` is what users call. `leaves` takes objects apart into tensors and the rest, `layout` says where those lie in
memory, `content_hash` identifies a piece, `shards` puts pieces of another world size together, `copying` gets tensors
into memory beside the training, `keeper` speaks to the worker's agent, `disk` reads and writes folders that others can
read.
All of this runs in ranks; what the agent does with it is `muster.node.keeping`.
"""
