"""What does a worker do in the world? The decisions of its agent and of its guard, without I/O.

Frames, ends of ranks and the time come in, orders go out. `muster-node`, torchrun's handler and the simulator drive the
same code: they bring what happens and carry out what is ordered. What a member owes the world:

    no rank of its runs when its lease is over, unless the coordinator is known to be dead and not only silent
    a stop with a shorter grace cuts a longer one that is under way
    a release that is read when the lease is over starts nothing before the lease is renewed
    a release starts nothing either if the connection that brought it has ended before everything was ready
    what happens between a hello and its welcome is told after the welcome
    a beat tells the guard until when ranks may run, so that it ends them even if the agent is stopped while cut off
"""
