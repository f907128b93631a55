"""Print the compiler's arguments for handlers in C++, to stand behind the source.

g++ -shared -fPIC my_handler.cc -o libmy_handler.so $(python -m torchere.handlers.cpp)
"""

from torchere.handlers.cpp import compile_flags

print(*compile_flags())
