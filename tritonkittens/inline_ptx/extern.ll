; Functions that one assembly string cannot express: a loop with an exit, one value made from two special registers.
; tritonkittens/inline_ptx/extern.py declares them to Triton, which links this file into kernels that call them.
target datalayout = "e-p6:32:32-i64:64-i128:128-i256:256-v16:16-v32:32-n16:32:64"
target triple = "nvptx64-nvidia-cuda"

; The number of the mbarrier.try_wait that saw the phase with parity %parity complete, or -1 when %limit of them did not.
define i32 @tritonkittens_spin_try_wait(i32 %address, i32 %parity, i32 %limit) alwaysinline nounwind {
entry:
  %some = icmp sgt i32 %limit, 0
  br i1 %some, label %try, label %failed

try:
  %count = phi i32 [ 1, %entry ], [ %next, %again ]
  %complete = call i32 asm sideeffect "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [$1], $2; selp.b32 $0, 1, 0, p; }", "=r,r,r,~{memory}"(i32 %address, i32 %parity)
  %done = icmp ne i32 %complete, 0
  br i1 %done, label %finish, label %again

again:
  %next = add i32 %count, 1
  %more = icmp sle i32 %next, %limit
  br i1 %more, label %try, label %failed

finish:
  ret i32 %count

failed:
  ret i32 -1
}

; %globaltimer modulo 2**48 in bits 16-63, %smid in bits 0-15, both read by one block.
define i64 @tritonkittens_time_and_place() alwaysinline nounwind {
  %read = call { i64, i32 } asm sideeffect "mov.u64 $0, %globaltimer; mov.u32 $1, %smid;", "=l,=r"()
  %time = extractvalue { i64, i32 } %read, 0
  %place = extractvalue { i64, i32 } %read, 1
  %high = shl i64 %time, 16
  %low = zext i32 %place to i64
  %stamp = or i64 %high, %low
  ret i64 %stamp
}
