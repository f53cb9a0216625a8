"""Stand-ins for packages that a text-only SGLang imports and never uses.

`engine_run.py` puts this on the path as ``sitecustomize.py``, so that the processes that SGLang
spawns have it too. A package that is there is left alone. Not among them: flashinfer, whose layer
norm is called, and cutlass, at whose sight flashinfer would take other kernels.
"""

import importlib.abc
import importlib.machinery
import sys
import types

NAMES = ("av", "decord", "gguf", "helion", "IPython", "lark", "llguidance", "mistral_common",
         "modelscope", "openai_harmony", "outlines", "pycountry", "xgrammar", "zstandard")


class Anything:
    """Can be called, asked for attributes, inherited from and put into a type union."""

    def __init__(self, *args, **kwargs):
        pass

    def __call__(self, *args, **kwargs):
        return Anything()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __or__(self, other):
        return self

    def __mro_entries__(self, bases):
        return ()


def any_schema(cls, source, handler):
    from pydantic_core import core_schema

    return core_schema.any_schema()


class Module(types.ModuleType):
    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if not name[0].isupper():
            return Anything()
        # Looks like a class: it may be a base, a type parameter, or a field of a pydantic model.
        return type(name, (), {"__get_pydantic_core_schema__": classmethod(any_schema),
                               "__class_getitem__": classmethod(lambda cls, item: cls)})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names):
        self.names = names

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return Module(spec.name)

    def exec_module(self, module):
        pass


def is_there(name):
    return importlib.machinery.PathFinder.find_spec(name) is not None


sys.meta_path.append(Finder({name for name in NAMES if not is_there(name)}))
