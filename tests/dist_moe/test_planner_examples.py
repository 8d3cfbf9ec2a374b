"""Every published plan of the release whose contract this package keeps, and how many bytes less this package takes."""

from dataclasses import dataclass, replace

import pytest
from tests.reference_plan import allowed_excess, reference_plan

from dist_moe.config import BlockScaledConfig, Config, VmmConfig
from dist_moe.planner import plan_memory

STAGED, MEGA = BlockScaledConfig(), BlockScaledConfig(pipeline="mega")
NVFP4, NVFP4_MEGA = BlockScaledConfig("nvfp4"), BlockScaledConfig("nvfp4", pipeline="mega")
TO_2, TO_8 = VmmConfig(2.0), VmmConfig(8.0)

README = Config(4, 128, 128, 2, 4, 2)  # T, D, F, K, E, layers a slot
README_MX = replace(README, num_local_input_tokens=256, vmm=TO_2, activation_slot_capacity_factor=1.0)
INFERENCE = Config(256, 256, 512, 2, 8, 1, inference=True)
LARGE = Config(8192, 7168, 2048, 8, 256, 4, 1.25, activation_slot_capacity_factor=1.0, num_activation_slots=2, vmm=TO_8)
GUIDE = Config(4096, 4096, 14336, 8, 128, 32, 1.5, vmm=VmmConfig(16.0))


@dataclass(frozen=True)
class Example:
    """A Config, the bytes and rows that were published for it, and how many bytes less this package takes."""

    config: Config
    W: int
    rows: tuple[int, int]  # device, total
    x: int
    scratch: tuple[int, int]  # device, host
    slot: tuple[int, int, int, int]  # minimum, balanced full-save, maximum useful, chosen
    totals: tuple[int, int]  # device buffer, virtual range
    less_scratch: tuple[int, int]
    less_slot: tuple[int, int, int]  # balanced full-save, maximum useful, chosen

    @property
    def num_slots(self) -> int:
        return 0 if self.config.inference else self.config.num_activation_slots

    @property
    def published(self) -> dict[str, int]:
        return self._figures(self.scratch, self.slot, self.totals)

    @property
    def ours(self) -> dict[str, int]:
        device, host = (size - less for size, less in zip(self.scratch, self.less_scratch, strict=True))
        slot = tuple(size - less for size, less in zip(self.slot, (0, *self.less_slot), strict=True))
        buffer = self.num_slots * slot[-1] + device
        return self._figures((device, host), slot, (buffer, buffer + host))

    def _figures(self, scratch, slot, totals) -> dict[str, int]:
        return {
            "balanced_recv_rows": self.config.num_local_input_tokens * self.config.top_k,
            "device_scratch_capacity_rows": self.rows[0],
            "total_scratch_capacity_rows": self.rows[1],
            "saved_input_bytes_per_layer": self.x,
            "device_scratch_bytes": scratch[0],
            "host_scratch_bytes": scratch[1],
            "minimum_activation_slot_bytes": slot[0],
            "balanced_full_save_activation_slot_bytes": slot[1],
            "maximum_useful_activation_slot_bytes": slot[2],
            "activation_slot_bytes": slot[3],
            "num_activation_slots": self.num_slots,
            "total_activation_bytes": self.num_slots * slot[3],
            "total_device_buffer_bytes": totals[0],
            "total_virtual_bytes": totals[1],
        }


EXAMPLES = {
    "P1": Example(
        replace(README, activation_slot_capacity_factor=1.0, vmm=TO_2),
        2,
        rows=(8, 16),
        x=1024,
        scratch=(12288, 12288),
        slot=(2048, 16384, 28672, 16384),
        totals=(28672, 40960),
        less_scratch=(768, 2048),
        less_slot=(2560, 2560, 2560),
    ),
    "P1b": Example(
        replace(README, vmm=TO_2),
        2,
        rows=(8, 16),
        x=1024,
        scratch=(12288, 12288),
        slot=(2048, 16384, 28672, 2048),
        totals=(14336, 26624),
        less_scratch=(768, 2048),
        less_slot=(2560, 2560, 0),
    ),
    "P2": Example(
        README,
        2,
        rows=(8, 8),
        x=1024,
        scratch=(12288, 0),
        slot=(2048, 16384, 16384, 2048),
        totals=(14336, 14336),
        less_scratch=(768, 0),
        less_slot=(2560, 2560, 0),
    ),
    "P3": Example(  # exact bytes round up
        replace(README, activation_slot_bytes=2049, num_activation_slots=3),
        2,
        rows=(8, 8),
        x=1024,
        scratch=(12288, 0),
        slot=(2048, 16384, 16384, 2176),
        totals=(18816, 18816),
        less_scratch=(768, 0),
        less_slot=(2560, 2560, 0),
    ),
    "P4": Example(  # 2048 + 1.5 * (16384 - 2048)
        replace(README, activation_slot_capacity_factor=1.5, vmm=TO_2),
        2,
        rows=(8, 16),
        x=1024,
        scratch=(12288, 12288),
        slot=(2048, 16384, 28672, 23552),
        totals=(35840, 48128),
        less_scratch=(768, 2048),
        less_slot=(2560, 2560, 3840),
    ),
    "P5": Example(  # more by a row pitch each of x, h1 and h2
        replace(README, inference=True, vmm=TO_2),
        2,
        rows=(8, 16),
        x=1024,
        scratch=(8192, 8192),
        slot=(0, 0, 0, 0),
        totals=(8192, 16384),
        less_scratch=(-1024, 0),
        less_slot=(0, 0, 0),
    ),
    "P6": Example(  # the device factor is capped to 2, the number of ranks
        replace(README, device_scratch_capacity_factor=5),
        2,
        rows=(16, 16),
        x=1024,
        scratch=(24576, 0),
        slot=(2048, 16384, 28672, 2048),
        totals=(26624, 26624),
        less_scratch=(2816, 0),
        less_slot=(2560, 2560, 0),
    ),
    "P7": Example(
        replace(README_MX, block_scaled=STAGED),
        2,
        rows=(640, 1152),
        x=65536,
        scratch=(1098240, 878592),
        slot=(131072, 1255424, 2050048, 1255424),
        totals=(2353664, 3232256),
        less_scratch=(13696, 12288),
        less_slot=(429824, 564992, 429824),  # of two layers h3 and the columns of h2
    ),
    "P9": Example(
        Config(100, 128, 128, 2, 8, 1, 1.5, block_scaled=STAGED),
        2,
        rows=(768, 768),
        x=25600,
        scratch=(1317888, 0),
        slot=(25600, 547840, 647168, 25600),
        totals=(1343488, 1343488),
        less_scratch=(16768, 0),
        less_slot=(135040, 151936, 0),
    ),
    "P10": Example(  # 32 balanced rows become 256
        Config(16, 256, 256, 2, 4, 1, block_scaled=STAGED),
        2,
        rows=(256, 256),
        x=8192,
        scratch=(878592, 0),
        slot=(8192, 413696, 413696, 8192),
        totals=(886784, 886784),
        less_scratch=(8960, 0),
        less_slot=(82688, 82688, 0),
    ),
    "P11": Example(
        replace(INFERENCE, block_scaled=NVFP4),
        4,
        rows=(640, 640),
        x=131072,
        scratch=(1559040, 0),
        slot=(0, 0, 0, 0),
        totals=(1559040, 1559040),
        less_scratch=(59136, 0),
        less_slot=(0, 0, 0),
    ),
    "P12": Example(
        replace(INFERENCE, block_scaled=NVFP4_MEGA),
        4,
        rows=(640, 640),
        x=131072,
        scratch=(1684480, 0),
        slot=(0, 0, 0, 0),
        totals=(1684480, 1684480),
        less_scratch=(184576, 0),
        less_slot=(0, 0, 0),
    ),
    "P13 staged": Example(
        replace(INFERENCE, block_scaled=STAGED),
        4,
        rows=(640, 640),
        x=131072,
        scratch=(1679360, 0),
        slot=(0, 0, 0, 0),
        totals=(1679360, 1679360),
        less_scratch=(28160, 0),
        less_slot=(0, 0, 0),
    ),
    "P13 mega": Example(
        replace(INFERENCE, block_scaled=MEGA),
        4,
        rows=(640, 640),
        x=131072,
        scratch=(1863680, 0),
        slot=(0, 0, 0, 0),
        totals=(1863680, 1863680),
        less_scratch=(212480, 0),
        less_slot=(0, 0, 0),
    ),
    "P14": Example(
        LARGE,
        32,
        rows=(81920, 524288),
        x=117440512,
        scratch=(4026531840, 21743271936),
        slot=(469762048, 9663676416, 51002736640, 9663676416),
        totals=(23353884672, 45097156608),
        less_scratch=(671047680, 3623878656),
        less_slot=(3758006272, 3758006272, 3758006272),
    ),
    "P15": Example(
        replace(LARGE, block_scaled=STAGED),
        32,
        rows=(82816, 525184),
        x=117440512,
        scratch=(3434545152, 18345885696),
        slot=(469762048, 8460419072, 40932720640, 8460419072),
        totals=(20355383296, 38701268992),
        less_scratch=(55612416, 297271296),
        less_slot=(4319252480, 8194789376, 4319252480),
    ),
    "P16": Example(
        replace(LARGE, block_scaled=MEGA),
        32,
        rows=(82816, 525184),
        x=117440512,
        scratch=(3625353216, 19365101568),
        slot=(469762048, 8460419072, 40932720640, 8460419072),
        totals=(20546191360, 39911292928),
        less_scratch=(246420480, 1316487168),
        less_slot=(4319252480, 8194789376, 4319252480),
    ),
    "P17": Example(  # a rank with one expert receives T * W rows at most, so that vmm has nothing to hold
        Config(128, 512, 256, 8, 8, 1, 2.0, vmm=TO_8),
        8,
        rows=(1024, 1024),
        x=131072,
        scratch=(4718592, 0),
        slot=(131072, 3145728, 3145728, 131072),
        totals=(4849664, 4849664),
        less_scratch=(1044992, 0),
        less_slot=(1046528, 1046528, 0),
    ),
    "P18": Example(  # D > F, odd rows, a slot half way
        Config(64, 512, 192, 4, 16, 3, 1.3, activation_slot_capacity_factor=0.5, num_activation_slots=2),
        4,
        rows=(333, 333),
        x=65536,
        scratch=(1321344, 0),
        slot=(196608, 2162688, 2576640, 1179648),
        totals=(3680640, 3680640),
        less_scratch=(252544, 0),
        less_slot=(781056, 781056, 390528),
    ),
}
EXAMPLES["P7 mega"] = replace(EXAMPLES["P7"], config=replace(README_MX, block_scaled=MEGA))
each_example = pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)


@each_example
def test_the_statement_of_the_reference_gives_what_it_published(example):
    figures = reference_plan(example.config, example.W)
    assert {name: figures[name] for name in example.published} == example.published


@each_example
def test_the_plan(example):
    plan = plan_memory(example.config, example.W)
    assert {name: getattr(plan, name) for name in example.ours} == example.ours
    assert plan.inference is example.config.inference
    assert plan.uses_host_scratch is (example.scratch[1] > 0)
    assert plan.activation_slot_capacity_factor == example.config.activation_slot_capacity_factor
    for name, most in allowed_excess(example.config, example.published).items():
        assert example.ours[name] <= example.published[name] + most, name


SIXTEEN_GIB = {"activation_slot_bytes": 16 * 2**30}
FACTOR_1 = {"activation_slot_capacity_factor": 1.0}
GUIDE_TABLE = [  # precision, slot policy; published slot, device scratch, host, device buffer; less scratch, host, slot
    (None, {}, 1073741824, 7449083904, 72007811072, 8522825728, 2415816704, 23353884672, 0),
    (None, SIXTEEN_GIB, 17179869184, 7449083904, 72007811072, 24628953088, 2415816704, 23353884672, 0),
    (None, FACTOR_1, 77309411328, 7449083904, 72007811072, 84758495232, 2415816704, 23353884672, 8587837440),
    (STAGED, {}, 1073741824, 8561811456, 81282465792, 9635553280, 134363136, 1277165568, 0),
    (STAGED, SIXTEEN_GIB, 17179869184, 8561811456, 81282465792, 25741680640, 134363136, 1277165568, 0),
    (STAGED, FACTOR_1, 90839973888, 8561811456, 81282465792, 99401785344, 134363136, 1277165568, 24514002944),
]


@pytest.mark.parametrize("precision, policy, slot, device, host, buffer, less, less_host, less_slot", GUIDE_TABLE)
def test_guide_table(precision, policy, slot, device, host, buffer, less, less_host, less_slot):
    config = replace(GUIDE, block_scaled=precision, **policy)
    reference, plan = reference_plan(config, 16), plan_memory(config, 16)
    names = ("activation_slot_bytes", "device_scratch_bytes", "host_scratch_bytes", "total_device_buffer_bytes")
    assert [reference[name] for name in names] == [slot, device, host, buffer]
    ours = [slot - less_slot, device - less, host - less_host, buffer - less - less_slot]
    assert [getattr(plan, name) for name in names] == ours
    assert plan.minimum_activation_slot_bytes == 1073741824
