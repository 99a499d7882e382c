"""Stage 3: parameters that are gathered before use and released after."""
