"""The training API over HTTP, in the shape of Tinker's: messages, service, jobs on all ranks, models of clients."""
