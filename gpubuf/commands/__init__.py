"""The commands of ``gpubuf``, a module each: ``add`` describes its options, ``run`` returns the exit code."""
