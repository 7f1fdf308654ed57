"""Protocol core of one member: parts that own their data, and `MemberMachine`, which routes events to them.

Each part is a file of its own and can be read alone. It owns its fields, reads other parts through their public
methods, and writes its commands into the one `Commands`. No I/O, no clock, no tensors.
"""
