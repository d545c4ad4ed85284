"""The build of the kernels: `library` is its state in this process, `recipe` what is built, `compilation` the builder's
process, `cache` where libraries are kept and which are trusted."""

from amplab.kernels.builder.library import BuildReport, KernelLibrary, checked_mode, ensure, report, settle

__all__ = ["BuildReport", "KernelLibrary", "checked_mode", "ensure", "report", "settle"]
