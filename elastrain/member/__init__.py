"""One member's machine: parts that own what they know, and `lifecycle.MemberMachine`, which routes events to them.

Each part is a file of its own and can be read alone: it owns its fields, asks others only by the questions that these
answer, and writes its commands into the one `Commands`. No I/O, no clock, no tensors.
"""
