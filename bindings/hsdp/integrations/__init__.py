"""hsdp within other training loops: `hsdp.integrations.transformers` and `hsdp.integrations.lightning`.

Each is imported by its full name; `import hsdp` imports neither. docs/tasks/trainers.md and lightning.md show how.
"""
