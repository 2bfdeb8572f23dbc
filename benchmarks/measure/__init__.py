"""How a call is timed, the least time that it could take, and the files that hold results."""
