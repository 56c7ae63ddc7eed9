"""hf_laer under Accelerate: the plugin, the hook in FSDP2's preparation, and FSDP2 on CPUs."""

from hf_laer.integrations.accelerate.cpu import enable_cpu_fsdp
from hf_laer.integrations.accelerate.hook import install_hook
from hf_laer.integrations.accelerate.plugin import LaerFSDPPlugin
from hf_laer.integrations.accelerate.resume import save_state

__all__ = ["LaerFSDPPlugin", "enable_cpu_fsdp", "install_hook", "save_state"]
