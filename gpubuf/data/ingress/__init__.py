"""Writers in other processes: queues of rows in shared memory, the writers' end, and the learner's."""
