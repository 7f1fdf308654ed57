"""Devices that compute: the port that every one of them has, the host's implementation, and that of accelerators."""

from elastrain.device.finding import current_device as current_device
from elastrain.device.finding import device_count as device_count
from elastrain.device.finding import device_of as device_of
from elastrain.device.finding import is_accelerator as is_accelerator
from elastrain.device.landing import DeviceEvent as DeviceEvent
from elastrain.device.port import DeviceDescription as DeviceDescription
from elastrain.device.port import DevicePort as DevicePort
from elastrain.device.port import PinError as PinError
from elastrain.device.switches import VARIABLES as VARIABLES
from elastrain.device.switches import switches as switches
