"""Everything that is timed beside the peers: data, operation, check, and traffic of each entry of the registry."""
