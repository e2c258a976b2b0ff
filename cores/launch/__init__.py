"""Starting engine cores: as plain local processes, or as Ray actors. Knows no HTTP, no balancing, and no restart policy."""
