"""Data sets of others, from files into buffers: a reader per format, behind :class:`~.recording.Source`."""
