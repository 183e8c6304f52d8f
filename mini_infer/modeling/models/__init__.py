"""One file per architecture, each reading like its paper."""
