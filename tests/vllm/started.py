"""Importing this starts vLLM's Python code in the process and registers the plugin, or skips the importing file."""

import pytest

from . import host

if reason := host.why_not():
    pytest.skip(reason, allow_module_level=True)

host.start()

from expertile.plugins import vllm as plugin  # noqa: E402

plugin.register()
