"""System call numbers as ``name:x86_64:aarch64``, grouped by whether a session may make the calls."""

from __future__ import annotations

import platform

MACHINE = platform.machine()
MACHINES = ("x86_64", "aarch64")


def _group(table: str) -> dict[str, int]:
    """The calls on this machine; ``-`` means that an architecture does not have the call."""
    if MACHINE not in MACHINES:
        return {}
    column = 1 + MACHINES.index(MACHINE)
    rows = (entry.split(":") for entry in table.split())
    return {row[0]: int(row[column]) for row in rows if row[column] != "-"}


FILES = _group("""
read:0:63 write:1:64 open:2:- close:3:57 stat:4:- fstat:5:80 lstat:6:- lseek:8:62 pread64:17:67 pwrite64:18:68
readv:19:65 writev:20:66 preadv:295:69 pwritev:296:70 preadv2:327:286 pwritev2:328:287 access:21:- faccessat:269:48
faccessat2:439:439 openat:257:56 openat2:437:437 creat:85:- ftruncate:77:46 fallocate:285:47 getdents:78:-
getdents64:217:61 getcwd:79:17 chdir:80:49 fchdir:81:50 rename:82:- renameat:264:38 renameat2:316:276 mkdir:83:-
mkdirat:258:34 rmdir:84:- link:86:- linkat:265:37 unlink:87:- unlinkat:263:35 symlink:88:- symlinkat:266:36
readlink:89:- readlinkat:267:78 umask:95:166 statfs:137:43 fstatfs:138:44 newfstatat:262:79 statx:332:291 mknod:133:-
mknodat:259:33 sendfile:40:71 copy_file_range:326:285 fsync:74:82 fdatasync:75:83
""")
# Landlock does not cover these, so they are refused at the reduced level, where only Landlock protects files.
FILE_ATTRIBUTES = _group("""
chmod:90:- fchmod:91:52 fchmodat:268:53 fchmodat2:452:452 chown:92:- fchown:93:55 lchown:94:- fchownat:260:54
truncate:76:45 utime:132:- utimes:235:- futimesat:261:- utimensat:280:88 getxattr:191:8 lgetxattr:192:9
fgetxattr:193:10 listxattr:194:11 llistxattr:195:12 flistxattr:196:13
""")
DESCRIPTORS = _group("""
dup:32:23 dup2:33:- dup3:292:24 pipe:22:- pipe2:293:59 poll:7:- ppoll:271:73 select:23:- pselect6:270:72
epoll_create:213:- epoll_create1:291:20 epoll_ctl:233:21 epoll_wait:232:- epoll_pwait:281:22 epoll_pwait2:441:441
eventfd:284:- eventfd2:290:19 signalfd:282:- signalfd4:289:74 timerfd_create:283:85 timerfd_settime:286:86
timerfd_gettime:287:87 sendto:44:206 recvfrom:45:207 shutdown:48:210
getsockname:51:204 getpeername:52:205 getsockopt:55:209
""")
MEMORY = _group("""
mprotect:10:226 munmap:11:215 brk:12:214 mremap:25:216 msync:26:227 mincore:27:232 madvise:28:233
pkey_mprotect:329:288 pkey_alloc:330:289 pkey_free:331:290
""")
SIGNALS_AND_TIME = _group("""
rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139 rt_sigpending:127:136 rt_sigtimedwait:128:137
rt_sigsuspend:130:133 sigaltstack:131:132 pause:34:- alarm:37:- setitimer:38:103 getitimer:36:102 timer_create:222:107
timer_settime:223:110 timer_gettime:224:108 timer_getoverrun:225:109 timer_delete:226:111 nanosleep:35:101
clock_nanosleep:230:115 clock_gettime:228:113 clock_getres:229:114 gettimeofday:96:169 time:201:- times:100:153
restart_syscall:219:128
""")
OWN_PROCESS = _group("""
getpid:39:172 getppid:110:173 gettid:186:178 getuid:102:174 geteuid:107:175 getgid:104:176 getegid:108:177
getresuid:118:148 getresgid:120:150 getgroups:115:158 getpgrp:111:- getpgid:121:155 setpgid:109:154 getsid:124:156
setsid:112:157 capget:125:90 uname:63:160 sysinfo:99:179 getrusage:98:165 getrlimit:97:163 setrlimit:160:164
getpriority:140:141 sched_yield:24:124 sched_getaffinity:204:123 sched_getparam:143:121 sched_getscheduler:145:120
sched_get_priority_max:146:125 sched_get_priority_min:147:126 sched_getattr:315:275 getcpu:309:168 arch_prctl:158:-
set_tid_address:218:96 set_robust_list:273:99 futex:202:98 futex_waitv:449:449 rseq:334:293 membarrier:324:283
getrandom:318:278 exit:60:93 exit_group:231:94 wait4:61:260 waitid:247:95
""")
OTHER_PROCESSES = _group("""
kill:62:129 tkill:200:130 tgkill:234:131 rt_sigqueueinfo:129:138 rt_tgsigqueueinfo:297:240 pidfd_open:434:434
pidfd_send_signal:424:424 prlimit64:302:261 sched_setaffinity:203:122
""")
NEW_PROCESSES = _group("""
fork:57:- vfork:58:- execve:59:221
""")
BY_ARGUMENT = _group("""
clone:56:220 mmap:9:222 socketpair:53:199 fcntl:72:25 flock:73:32 fadvise64:221:223 readahead:187:213 ioctl:16:29
prctl:157:167 personality:135:92 close_range:436:436
""")
REFUSED = _group("""
socket:41:198 connect:42:203 bind:49:200 listen:50:201 accept:43:202 accept4:288:242 execveat:322:281 ptrace:101:117
process_vm_readv:310:270 process_vm_writev:311:271 process_madvise:440:440 process_mrelease:448:448 kcmp:312:272
pidfd_getfd:438:438 unshare:272:97 setns:308:268 mount:165:40 umount2:166:39 pivot_root:155:41 chroot:161:51
move_mount:429:429 open_tree:428:428 fsopen:430:430 fsconfig:431:431 fsmount:432:432 fspick:433:433
mount_setattr:442:442 bpf:321:280 perf_event_open:298:241 userfaultfd:323:282 io_uring_setup:425:425
io_uring_enter:426:426 io_uring_register:427:427 io_setup:206:0 io_submit:209:2 keyctl:250:219 add_key:248:217
request_key:249:218 init_module:175:105 finit_module:313:273 delete_module:176:106 kexec_load:246:104
kexec_file_load:320:294 reboot:169:142 swapon:167:224 swapoff:168:225 open_by_handle_at:304:265
name_to_handle_at:303:264 setuid:105:146 setgid:106:144 setreuid:113:145 setregid:114:143 setresuid:117:147
setresgid:119:149 setgroups:116:159 setfsuid:122:151 setfsgid:123:152 capset:126:91 seccomp:317:277
landlock_create_ruleset:444:444 landlock_add_rule:445:445 landlock_restrict_self:446:446 settimeofday:164:170
clock_settime:227:112 adjtimex:159:171 clock_adjtime:305:266 acct:163:89 quotactl:179:60 quotactl_fd:443:443
iopl:172:- ioperm:173:- modify_ldt:154:- syslog:103:116 shmget:29:194 shmat:30:196 shmctl:31:195 semget:64:190
semop:65:193 semctl:66:191 msgget:68:186 msgsnd:69:189 msgrcv:70:188 msgctl:71:187 mq_open:240:180
memfd_create:319:279 memfd_secret:447:447 sethostname:170:161 setdomainname:171:162 fanotify_init:300:262
inotify_init:253:- inotify_init1:294:26 migrate_pages:256:238 move_pages:279:239 mbind:237:235 set_mempolicy:238:237
mlock:149:228 mlock2:325:284 mlockall:151:230 sched_setscheduler:144:119 sched_setattr:314:274 sched_setparam:142:118
ioprio_set:251:30 vhangup:153:58 nfsservctl:180:42 lookup_dcookie:212:18 sync:162:81 syncfs:306:267 vmsplice:278:75
splice:275:76 tee:276:77 uselib:134:- ustat:136:- sysfs:139:- setpriority:141:140 setsockopt:54:208 sendmsg:46:211
recvmsg:47:212
""")
