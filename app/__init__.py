"""What packs import from the package `app`."""
