"""Workers: the processes that run batches, and the server's side of them.

worker: a process that loads a handler and runs batches.
executor: a place in a worker where one batch runs at a time.
lane: the thread of an executor in its worker (the main thread if it is the only one), with its data socket.
room: a worker process that several versions share; each of these versions is a tenant of the room.
run: one batch in a worker, from its dispatch to its answer.
loss: the end of a worker process, with its cause.
place: the slot of a run in its worker.
page: memory shared by server and worker: the progress of each lane, the cancellation flags of each place.
"""
